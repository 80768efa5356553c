"""The host's program: what is made in which order, and its books."""
