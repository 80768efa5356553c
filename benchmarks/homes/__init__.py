"""Emulated home links and routers."""
