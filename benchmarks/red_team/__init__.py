"""Swarms under attack, whole and in one thread: the kit's attacks in figures, and the mutating adversary."""
