"""A stage on a device: its speed, its memory and its inner steps. `python -m benchmarks.gpu`."""
