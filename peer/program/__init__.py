"""The volunteer's programs: what is made in which order, and ended."""
