"""A version at a peer: held, kept on disk, fetched, and gone back to."""
