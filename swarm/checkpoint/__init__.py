"""A stage's state as bytes: for digests and joiners, for the archive, for Hugging Face."""
