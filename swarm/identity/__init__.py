"""Who signs: keys, their backup, and what all signed records have in common."""
