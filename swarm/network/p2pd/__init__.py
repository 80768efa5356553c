"""Calls over p2pd: the daemon's process, its control protocol, streams and relays."""
