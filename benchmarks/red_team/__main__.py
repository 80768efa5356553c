"""Every attack of the kit against a whole swarm, and what it came to: `python -m benchmarks.red_team --json`.

Of each attack the worst of all seeds: how many honest peers were shut out, and processes ended; the liar's share of the
credit, and of what its neighbours saw it do, and tokens credited to it that they did not see; the share of the steps'
tokens that was lost; the held-out loss over that of one process that nobody lies to, on the microbatches that were
counted, at its worst and at the end; after how many versions the liar was out. The row "nobody" is of runs without a
liar: what is left of a ratio by chance.

A run lasts as long as the law of audits needs to find 99 % of those who lie in each contribution, and 100 versions
more, in which what they spoilt is made up for, unless `--steps` says otherwise.

`--keep FILE` keeps each run with the commit it is of, all attacks with one seed before any with the next, and goes on
from there.
"""

import argparse
import json
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept_pieces import KeptPieces
from benchmarks.red_team.invariants import shut_out
from benchmarks.red_team.virtual_swarm import MICROBATCH_TOKENS, PeerMaker, Setting, VirtualSwarm
from benchmarks.results.staleness import git
from peer.adversary.peer import MisbehavingPeer
from peer.program.daemon import PeerDaemon
from swarm.attacks import KINDS, Attack
from swarm.identity.key import Identity
from verification.audit.draws import bound_99, contribution_rate

SEEDS = 5
FROM_STEP = 2
REPLICAS = 5
"""Of the liar's stage, itself among them."""
LAWFUL_STEPS = FROM_STEP + int(bound_99(contribution_rate(REPLICAS), REPLICAS - 1)) + 2
"""A contribution is drawn more seldom than one of its microbatches; draws are revealed two versions later."""
STEPS = LAWFUL_STEPS + 100
FIRST = Setting((REPLICAS, 1), ((0, 1),), steps=STEPS)
LAST = Setting((1, REPLICAS), ((1, 1),), steps=STEPS)
ROOT = Path(__file__).parents[2]
NOBODY = "nobody"
LASTING, ENDING = 2, 20
"""Versions over which a ratio of losses is taken, at its worst and at the end: a single one's is chance."""
FIGURES = (
    "honest_shut_out",
    "processes_ended",
    "credit_share",
    "receipt_share",
    "unseen_tokens",
    "lost_share",
    "worst_loss_ratio",
    "loss_ratio",
)
"""Of which the largest is the worst."""


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


def figures(swarm: VirtualSwarm) -> dict[str, Any]:
    """Of one run."""
    seen, setting = swarm.seen, swarm.setting
    liars = {peer.peer_id for peer in swarm.peers if peer.is_liar}
    stage = max({0, 1}, key=lambda one: setting.peers[one])
    credit = sum(tokens for peer, tokens in seen.credit.items() if peer in liars)
    of_stage = {peer.peer_id for peer in swarm.peers if peer.stage == stage}
    whole = sum(tokens for peer, tokens in seen.credit.items() if peer in of_stage)
    receipts = {peer: len(seen.receipts.get((stage, peer), ())) for peer in of_stage}
    versions = sorted(seen.losses.keys() & seen.alone.keys())
    ratios = [seen.losses[version] / seen.alone[version] for version in versions]
    smooth = [sum(ratios[at : at + LASTING]) / LASTING for at in range(FROM_STEP, len(ratios) - LASTING + 1)]
    out = _out_at(seen.events, liars)
    return {
        "honest_shut_out": len(shut_out(swarm)),
        "processes_ended": len(seen.broken),
        "steps": seen.version,
        "credit_share": credit / max(1, whole),
        "receipt_share": sum(receipts[peer] for peer in liars) / max(1, sum(receipts.values())),
        "unseen_tokens": max(0, credit - MICROBATCH_TOKENS * sum(receipts[peer] for peer in liars)),
        "lost_share": 1 - seen.counted_tokens / (setting.steps * setting.microbatches * MICROBATCH_TOKENS),
        "worst_loss_ratio": max(smooth, default=math.nan),
        "loss_ratio": sum(ratios[-ENDING:]) / len(ratios[-ENDING:]) if ratios else math.nan,
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
    made: dict[str, Any] = {name: max(one[name] for one in found) for name in FIGURES}
    made["steps"] = min(one["steps"] for one in found)
    made["found_after_versions"] = None if None in after else max(after)
    made["put_out"] = len(after) - after.count(None)
    made["seeds"] = len(found)
    return made


def setting_of(kind: str, *, seed: int, steps: int) -> Setting:
    """The liar is of the first stage and of the last by turns, if the attack does anything in both."""
    if kind == NOBODY:
        return replace(FIRST if seed % 2 == 0 else LAST, seed=seed, steps=steps).honest()
    attack = Attack(kind, FROM_STEP)
    in_first = attack.works_in(0, 2) and (seed % 2 == 0 or not attack.works_in(1, 2))
    return replace(FIRST if in_first else LAST, seed=seed, steps=steps)


def cell(kind: str, setting: Setting, commit: str) -> dict[str, Any]:
    """One run under attack."""
    maker = PeerMaker() if kind == NOBODY else KitMaker(Attack(kind, FROM_STEP))
    return {**figures(run(setting, maker)), "commit": commit}


def table(pieces: KeptPieces, kinds: Sequence[str], *, seeds: int, steps: int) -> dict[str, dict[str, Any]]:
    """By attack."""
    commit = git(ROOT, "describe", "--always", "--dirty") or "unknown"
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for seed in range(seeds):
        for kind in kinds:
            setting = setting_of(kind, seed=seed, steps=steps)
            found[kind].append(pieces.get(f"{kind}/{seed}/{steps}", partial(cell, kind, setting, commit)))
    return {kind: worst_of(runs) for kind, runs in found.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """The table, printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.red_team", description=__doc__)
    parser.add_argument("--attacks", nargs="*", choices=[NOBODY, *KINDS], default=[NOBODY, *KINDS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=FIRST.steps)
    parser.add_argument("--keep", type=Path, help="keep runs here, and go on from them")
    parser.add_argument("--stop-after", type=float, help="seconds after which no run is begun")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--smoke", action="store_true", help="one attack, one seed, few steps")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.attacks, chosen.seeds, chosen.steps = ["written_result"], 1, 6
    with KeptPieces(chosen.keep, total=len(chosen.attacks) * chosen.seeds, stop_after_s=chosen.stop_after) as pieces:
        found = table(pieces, chosen.attacks, seeds=chosen.seeds, steps=chosen.steps)
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
