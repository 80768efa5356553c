"""What peers of a benchmark have left on their disks: certified results, and snapshots that must be equal."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from swarm.checkpoint.results import SIGNED, read_signed
from swarm.core.round.contribution import Result


def results_on(folder: Path) -> list[Result]:
    """Of the peer whose folder it is, in their order."""
    found = [read_signed(path) for path in sorted(folder.rglob(f"results-*{SIGNED}"))]
    return [read[0] for read in found if read is not None]


def members_on(folder: Path) -> int:
    """Of the version that the newest result on this disk makes."""
    newest = sorted(folder.rglob(f"results-*{SIGNED}"))[-1:]
    read = [read_signed(path) for path in newest]
    return max((len(found[0].roster.members_after) for found in read if found is not None), default=0)


def are_equal(folders: Sequence[Path]) -> bool:
    """Whether all snapshots of one version are the same bytes, on whichever disks they are."""
    states: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.rglob("snapshots-*/**/*"):
            if path.suffix == ".state":
                name = str(path.relative_to(folder)).split("snapshots-", 1)[1].split("/", 1)[1]
                states.setdefault(name, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
    return bool(states) and all(len(digests) == 1 for digests in states.values())
