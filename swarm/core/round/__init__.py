"""A step's decisions: who has done what, what is certified of it, and whose word counts."""
