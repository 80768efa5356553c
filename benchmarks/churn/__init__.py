"""Peers that come and go, and many of them."""
