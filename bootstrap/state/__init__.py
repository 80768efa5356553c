"""The states of a run at its host: where stages begin, what is archived, and going back."""
