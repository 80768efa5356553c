"""Who may come in, by which door, and over which relay."""
