"""What there is of a machine for its owner's peers, and how they share it with other programs."""
