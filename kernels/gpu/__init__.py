"""Kernels on a GPU, to the same bytes as on the CPU."""
