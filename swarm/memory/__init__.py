"""Memory that is used again."""
