"""Every attack of the kit against a whole swarm, and what it came to: `python -m benchmarks.red_team --json`.

Of each attack the worst of all seeds: how many honest peers were shut out, and processes ended; the liar's share of the
credit, and of what its neighbours saw it do; the held-out loss over that of the run where nobody lies, at its worst
and at the end; after how many versions the liar was out.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.red_team.invariants import shut_out
from benchmarks.red_team.virtual_swarm import PeerMaker, Setting, VirtualSwarm
from peer.adversary.peer import MisbehavingPeer
from peer.program.daemon import PeerDaemon
from swarm.attacks import KINDS, Attack
from swarm.identity.key import Identity

SEEDS = 5
FROM_STEP = 2
FIRST, LAST = Setting((5, 1), ((0, 1),), steps=24), Setting((1, 5), ((1, 1),), steps=24)
LASTING = 2
"""Versions over which a ratio of losses is taken: a single one's is chance."""


class KitMaker(PeerMaker):
    """Liars of one attack."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack

    def make(self, swarm: VirtualSwarm, stage: int, index: int, identity: Identity, **given: Any) -> PeerDaemon:
        transport, directory = swarm.network.transport(identity), swarm.network.directory(identity)
        return MisbehavingPeer(
            self._attack, given.pop("volunteer"), identity, transport, directory, swarm.host_id, **given
        )


def run(setting: Setting, maker: PeerMaker) -> VirtualSwarm:
    """One run, whose loss is known at each version."""
    swarm = VirtualSwarm(setting, maker, rng=random.Random(setting.seed), keeps_weights=True)
    swarm.go()
    return swarm


def figures(swarm: VirtualSwarm, honest: Mapping[int, float]) -> dict[str, Any]:
    """Of one run; `honest`: held-out loss by version of the same where nobody lies."""
    seen = swarm.seen
    liars = {peer.peer_id for peer in swarm.peers if peer.is_liar}
    stage = next(peer.stage for peer in swarm.peers if peer.is_liar)
    credit = sum(tokens for peer, tokens in seen.credit.items() if peer in liars)
    of_stage = {peer.peer_id for peer in swarm.peers if peer.stage == stage}
    whole = sum(tokens for peer, tokens in seen.credit.items() if peer in of_stage)
    receipts = {peer: len(seen.receipts.get((stage, peer), ())) for peer in of_stage}
    ratios = [seen.losses[version] / honest[version] for version in sorted(seen.losses.keys() & honest.keys())]
    smooth = [sum(ratios[at : at + LASTING]) / LASTING for at in range(FROM_STEP, len(ratios) - LASTING + 1)]
    out = _out_at(seen.events, liars)
    return {
        "honest_shut_out": len(shut_out(swarm)),
        "processes_ended": len(seen.broken),
        "steps": seen.version,
        "credit_share": credit / max(1, whole),
        "receipt_share": sum(receipts[peer] for peer in liars) / max(1, sum(receipts.values())),
        "worst_loss_ratio": max(smooth, default=math.nan),
        "loss_ratio": seen.held_out / honest[max(honest)],
        "found_after_versions": None if out is None else max(0, out - FROM_STEP),
    }


def _out_at(events: Sequence[Mapping[str, Any]], liars: Collection[str]) -> int | None:
    """Version at which the first of the liars was put out; None if none was."""
    version = 0
    for event in events:
        if event["event"] == "version":
            version = int(event["version"])
        elif event["event"] in ("banned", "quarantined") and event["peer_id"] in liars:
            return version
    return None


def worst_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of an attack's runs."""
    after = [one["found_after_versions"] for one in found]
    made: dict[str, Any] = {name: max(one[name] for one in found) for name in found[0] if name != "steps"}
    made["steps"] = min(one["steps"] for one in found)
    made["found_after_versions"] = None if None in after else max(after)
    return made


def table(kinds: Sequence[str], *, seeds: int, steps: int, say: Any) -> dict[str, dict[str, Any]]:
    """By attack."""
    held: dict[Setting, Mapping[int, float]] = {}
    made, began = {}, time.time()
    for number, kind in enumerate(kinds):
        attack = Attack(kind, FROM_STEP)
        found = []
        for seed in range(seeds):
            setting = FIRST if attack.works_in(0, 2) and (seed % 2 == 0 or not attack.works_in(1, 2)) else LAST
            setting = replace(setting, seed=seed, steps=steps)
            if setting not in held:
                held[setting] = dict(run(setting.honest(), PeerMaker()).seen.losses)
            found.append(figures(run(setting, KitMaker(attack)), held[setting]))
        made[kind] = worst_of(found)
        left_s = (time.time() - began) / (number + 1) * (len(kinds) - number - 1)
        say(f"{kind}: {made[kind]}; {number + 1} of {len(kinds)}, {left_s:.0f} s left")
    return made


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """The table, printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.red_team", description=__doc__)
    parser.add_argument("--attacks", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=FIRST.steps)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--smoke", action="store_true", help="one attack, one seed, few steps")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.attacks, chosen.seeds, chosen.steps = ["written_result"], 1, 6
    found = table(chosen.attacks, seeds=chosen.seeds, steps=chosen.steps, say=lambda said: print(said, file=sys.stderr))
    print(json.dumps(found, indent=2) if chosen.json else _rows(found))
    return found


def _rows(found: Mapping[str, Mapping[str, Any]]) -> str:
    names = list(next(iter(found.values())))
    lines = [" ".join(["attack".ljust(24), *(name.rjust(20) for name in names)])]
    for kind, row in found.items():
        cells = [f"{one:.3f}" if isinstance(one, float) else str(one) for one in row.values()]
        lines.append(" ".join([kind.ljust(24), *(cell.rjust(20) for cell in cells)]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
