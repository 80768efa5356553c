"""What is signed about a round's contributions and reductions."""
