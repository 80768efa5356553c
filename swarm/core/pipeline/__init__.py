"""A microbatch's decisions: which data, which peer, how much at once."""
