"""What each kind of evidence holds: how it is put together, and taken apart with nothing in it believed yet."""
