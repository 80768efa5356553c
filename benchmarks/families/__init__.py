"""Each family of models, from a checkpoint through a swarm and back: `python -m benchmarks.families`."""
