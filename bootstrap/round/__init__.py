"""The stages' steps as the host follows them."""
