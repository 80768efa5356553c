"""This is where a stage's state becomes bytes: for digests and joiners, for the archive, for Hugging Face."""
