"""A demo's figures: the host's report, and what only the demo knows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.demo.request import MICROBATCH_SIZE, SEQUENCE_LENGTH
from swarm.data.bigram import bigram_loss
from swarm.data.prepare import PreparedData
from swarm.disk.whole_file import whole_file


def held_out_bigram_loss(data: PreparedData, *, evaluate_tokens: int) -> float:
    """Loss in nats a token of a bigram model of the training text, on the held-out tokens that the host evaluates."""
    train, held_out = data.train(), data.held_out()
    per_batch = MICROBATCH_SIZE * SEQUENCE_LENGTH
    num_batches = max(1, min((len(held_out) - 1) // per_batch, evaluate_tokens // per_batch))
    num_windows = min((len(held_out) - 1) // SEQUENCE_LENGTH, num_batches * MICROBATCH_SIZE)
    return bigram_loss(
        np.asarray(train.read(0, len(train))),
        np.asarray(held_out.read(0, num_windows * SEQUENCE_LENGTH + 1)),
        vocab_size=data.vocab_size,
    )


def demo_report(
    host: dict[str, Any],
    *,
    exits: Mapping[str, int | None],
    stages: Mapping[str, int],
    kills: Mapping[str, int],
    bigram: float | None,
    alone: float | None = None,
    export_dir: Path | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The host's report with the peers' exit codes, the bigram's loss and the export.

    `exits`: exit status of the demo's own peers by id, negative for a signal's. `kills`: the version when each
    was killed. `alone`: what one member of a run in windows comes to by itself.
    """
    peers = [dict(peer) for peer in host.get("peers", [])]
    known = {peer["peer_id"] for peer in peers}
    peers += [
        {"peer_id": peer_id, "stage": stages[peer_id], "microbatches": 0} for peer_id in exits if peer_id not in known
    ]
    for peer in peers:
        peer["exit"] = exits.get(peer["peer_id"])
        peer["killed_at"] = kills.get(peer["peer_id"])
    held_out = {"start": None, "end": None, **host.get("held_out_loss", {}), "bigram": bigram, "alone": alone}
    return {
        **host,
        "held_out_loss": held_out,
        "peers": sorted(peers, key=lambda peer: (peer["stage"], peer["peer_id"])),
        "export_dir": str(export_dir) if export_dir is not None else None,
        **extra,
    }


def read_host_report(path: Path) -> dict[str, Any]:
    """The host's report; an empty one if it wrote none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")
