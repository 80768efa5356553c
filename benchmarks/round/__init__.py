"""A round's bytes: averaging, codecs, and delayed updates."""
