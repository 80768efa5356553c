"""Vectors between peers: their codecs, the parts they are cut into, and the exact combination of contributions."""
