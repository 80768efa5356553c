"""Kernels of the codecs: values in blocks or tokens, and the formats of their bytes."""
