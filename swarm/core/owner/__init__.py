"""The decisions of a daemon as its owner's guest."""
