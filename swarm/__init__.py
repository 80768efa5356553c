"""homeswarm: volunteers train one large model together over the Internet."""

__version__ = "0.1.0"
PROTOCOL = 1
"""Number of the wire protocol; peers of another number are refused by name."""
