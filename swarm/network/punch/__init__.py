"""Hole punching: direct streams between two peers that nobody can dial."""
