"""A microbatch at a peer: born, computed, sent on, and brought home."""
