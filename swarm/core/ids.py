"""Types for the swarm's names of things, so that a step is never passed for a stage."""

from typing import NewType

PeerId = NewType("PeerId", str)
"""libp2p peer id in base58 (`12D3Koo...`); it embeds the peer's Ed25519 public key."""

RunId = NewType("RunId", str)
"""Hex SHA-256 of the run's canonical settings."""

StageIndex = NewType("StageIndex", int)
"""Position of a stage in the pipeline, from 0."""

Version = NewType("Version", int)
"""Number of optimizer steps a stage's weights have taken."""

Step = NewType("Step", int)
"""The optimizer step a microbatch counts in; step t turns version t into version t + 1."""

MicrobatchId = NewType("MicrobatchId", int)
"""Position of a microbatch in the run's data order (see `swarm.core.pipeline.data_order`)."""
