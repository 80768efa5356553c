"""What is signed about a microbatch, and what screens and claims say of it."""
