"""The owner's machine: limits, memory, leaving, sharing."""
