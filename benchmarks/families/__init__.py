"""Each family of models, from a checkpoint through a swarm and back to transformers: `python -m benchmarks.families`."""
