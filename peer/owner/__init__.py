"""The volunteer's side of a daemon: limits, the machine, and what it says of its work."""
