"""The figures of README's table: the commands that give them, what came of each and when, and the table itself."""
