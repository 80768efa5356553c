"""The digest of bulk bytes that are committed to: parts of contributions and results, bodies of hops.

BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), 32 bytes. Every byte of a round is hashed when it is committed to
and when it comes, which is a large share of what an honest round computes: BLAKE3 takes 0.17 CPU seconds a GB on one
core with AVX-512, SHA-256 with the processor's own instructions 0.6, and on processors without them four times that.
Small facts (`swarm.core.canonical.digest`), states and files stay with SHA-256.
"""

from blake3 import blake3


def bulk_digest(body: bytes | bytearray | memoryview) -> bytes:
    """Of a C-contiguous buffer of bytes."""
    return blake3(body).digest()
