"""A version's decisions: what is certified of it, what makes it a step, and what is gone on from."""
