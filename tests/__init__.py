"""Tests; threads of compute libraries sleep while they wait, as in every program of ours."""

from pathlib import Path

from swarm.local.compute_pools import wait_asleep

wait_asleep()  # read once, when torch is first imported: before any module here is

ROOT = Path(__file__).parent.parent
"""The repository: what tests read of it, and where they start programs."""
