"""A step at a peer: its work is averaged with the others', voted on, and taken."""
