"""What a host's owner sees of the run, and commands."""
