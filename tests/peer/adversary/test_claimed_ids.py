"""One liar of five lists everybody's microbatches: it gets what it did, and the others what they did.

With the rules of before (an id counts once, at its highest attempt; nobody looks at papers) the same liar had from
61 to 100 % of the credit of its stage, and the honest ones' gradients no weight.
"""

import asyncio
from pathlib import Path
from typing import Any

from swarm.core.round.contribution import Result
from tests.swarm_in_process import manifest_of, swarm_in_process

STEPS, BEGINS = 7, 2
TABLES: dict[str, dict[str, Any]] = {
    "run": {"trust": "public"},
    "averaging": {"rule": "mean", "delay": 0},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1, "total_steps": STEPS},
    "checkpoint": {"every_steps": STEPS, "snapshot_every": STEPS},
    "batch": {"microbatch_size": 2, "target_tokens": 320},
}
LIAR = 4
"""Of five, in the order in which they were added."""


def play(folder: Path, attack: str | None, stage: int) -> dict[str, Any]:
    """What came of a run, whose liar is the last of its stage."""
    peers = (5, 1) if stage == 0 else (1, 5)
    tables = TABLES | {"limits": {"founders": [peers[0], peers[1]]}}
    attacks = {(stage, LIAR): f"{attack}@{BEGINS}"} if attack is not None else {}
    found: dict[str, Any] = {}

    async def train() -> None:
        manifest = manifest_of(**{name: table for name, table in tables.items() if name != "limits"})
        results: dict[int, Result] = {}
        async with swarm_in_process(manifest, folder, peers=peers, attacks=attacks) as swarm:
            everyone = swarm.of_stage(stage)
            swarm.on_applied.append(
                lambda steps, applied: (
                    results.setdefault(int(applied.result.roster.step), applied.result)
                    if steps.chain.stage == stage
                    else None
                )
            )
            report = await swarm.finished(timeout_s=60.0)
            found.update(report=report, liar=everyone[LIAR].peer_id, results=results, events=swarm.events)

    asyncio.run(train())
    return found
