"""Colours of this folder's plots."""

SURFACE, INK, MUTED, GRID = "#fcfcfb", "#1f1f1e", "#6f6e69", "#e6e5e0"
COLORS = ("#2a78d6", "#e0602b", "#2f9e6e", "#8a5cc2", "#c2a21f", "#b8396b", "#4b5563", "#0f8fa8")
