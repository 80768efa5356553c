"""The volunteer's side of a daemon: limits, and what it says of its work."""
