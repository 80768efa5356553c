"""The seeds of stochastic rounding: from facts that everyone in a round knows, so it can be redone."""

from swarm.core.canonical import digest
from swarm.core.ids import PeerId, StageIndex, Version


def part_seeds(run_id: str, stage: StageIndex, version: Version, peer: PeerId, *, num_parts: int) -> list[bytes]:
    """Of each part of the peer's contribution to the round that starts from `version`."""
    return [digest("part-seed", [run_id, stage, version, peer, part]) for part in range(num_parts)]


def reduced_seed(run_id: str, stage: StageIndex, version: Version, part: int) -> bytes:
    """Of what reducers make of a part in the round that starts from `version`, whoever reduces it."""
    return digest("reduced-seed", [run_id, stage, version, part])
