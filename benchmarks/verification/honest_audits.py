"""How often honest peers of a mixed swarm are accused, and what audits change: nothing.

    python -m benchmarks.verification.honest_audits [--keep honest.jsonl] [--json]

Two stages of eight peers, each peer on a machine of its own: a process with its instruction set and number of threads
(`benchmarks.machines`), which computes its microbatches and its replays. Every replica audits every microbatch of every
other, and every contribution whole: by the plain bounds, by what its error moves, and all audits of a peer together by
the law of biases (docs/verification.md, section 7). Microbatches come as chance has it and are replayed by number, so
sums have another order, too. fp32 compute; each wire carries activations, gradients and contributions.

Three scenes on each wire: the language, two microbatches again and again until they are known by heart, and a language
that is learned after another. In each half of the machines are killed and started again a third of the way, the others
after two thirds. Beside each run stands the same one that nobody audits: all losses and the last weights must be equal
to the bit.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from benchmarks.kept_pieces import KeptPieces
from benchmarks.machines import Kind, Machine, machines

if TYPE_CHECKING:
    from peer.sim import TinyRun

MACHINES = (
    Kind("native", 1),
    Kind("native", 2),
    Kind("avx2", 1),
    Kind("avx2", 2),
    Kind("baseline", 1),
    Kind("baseline", 2, by_sample=True),
    Kind("native", 1, weights_at=16, by_sample=True),
    Kind("avx2", 1, weights_at=32),
)
"""Of the peers of a stage, in order."""
WIRES = ("int8", "bf16", "fp32")
QUIET = {"language": 0, "by_heart": 25, "second_language": 10}
"""Scenes, with the steps at their beginning that nobody audits: until the loss is small, or the language changes."""
AUDITED_STEPS = 12
"""The last two's work is not audited any more, two quiet ones' is: in 10 or 12 steps a scene 224 audits of microbatches
each, and 112 of contributions."""
SMOKE_STEPS = 3
BY_HEART = 2
"""Microbatches."""
SEED = 7
AUDITS_GOAL = 10_000
"""Of contributions, and of microbatches."""
SHARES = ("largest_honest_share", "largest_moved_share", "largest_bias_share")
"""Of the nearest bound; of that on what an error moves; of the law of biases. Where the last passes 1 a peer is led."""
SHARE_GOAL = 0.3
"""Largest honest error over the fraud bound."""


@dataclass(frozen=True)
class Scene:
    """Which wire, and what is learned."""

    wire: str
    name: str
    replicas: int = len(MACHINES)
    audited_steps: int = AUDITED_STEPS
    restarts: bool = True

    @property
    def steps(self) -> int:
        return QUIET[self.name] + self.audited_steps

    def tiny(self) -> "TinyRun":
        from peer.sim import TinyRun
        from swarm.core.settings import AuditSettings, CodecSettings

        each, wire = self.replicas - 1, cast(Any, self.wire)
        tiny = TinyRun(
            num_replicas=self.replicas,
            microbatches_per_step=2 * self.replicas,
            hidden_size=64,
            sequence_length=32,
            total_steps=self.steps,
            vocab_size=256,  # of which a step's work touches a part
            audits=AuditSettings(hop_budget=each, contribution_budget=each),
            codecs=CodecSettings(activations=wire, activation_gradients=wire, averaging=wire),
        )
        changes_at = QUIET[self.name] * tiny.microbatches_per_step
        return replace(
            tiny,
            distinct_microbatches=BY_HEART if self.name == "by_heart" else None,
            language_changes_at=changes_at if self.name == "second_language" else None,
        )


def run(scene: Scene, started: Sequence[Machine], *, audited: bool) -> dict[str, Any]:
    """A run in which the peers compute with these machines, by their index, in turn."""
    from peer.sim import SimulatedSwarm

    swarm = SimulatedSwarm(
        scene.tiny(), seed=SEED, model_of=lambda model, stage, index: started[index % len(started)].model(model, stage)
    )
    audits, swarm.audits = swarm.audits, []
    swarm.run(QUIET[scene.name])
    swarm.audits = audits if audited else []
    for half in (started[::2], started[1::2]):
        swarm.run(scene.audited_steps // 3)
        for machine in half if scene.restarts else ():
            machine.start_again()
    outcome = swarm.run(scene.audited_steps - 2 * (scene.audited_steps // 3))
    return {
        "losses": outcome.losses,
        "held_out": outcome.held_out,
        "state_digests": [digest.hex() for digest in outcome.state_digests],
        "bans": len(outcome.bans),
        "quarantines": len(outcome.quarantined),
        **asdict(outcome.audits),
    }


def beside(scene: Scene, audited: Mapping[str, Any], silent: Mapping[str, Any]) -> dict[str, Any]:
    """What audits found, and whether the run that nobody audited came to the same."""
    losses = list(audited["losses"].values())
    compared = ("losses", "held_out", "state_digests")
    return {
        **asdict(scene),
        "steps": scene.steps,
        "audits": audited["hops"] + audited["contributions"],
        **{name: value for name, value in audited.items() if name not in compared},
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "last_loss_unverified": list(silent["losses"].values())[-1],
        "equal_to_the_bit": all(audited[name] == silent[name] for name in compared),
    }


def total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all scenes on one wire, or on all."""
    audits, accused = sum(row["audits"] for row in rows), sum(row["bans"] + row["quarantines"] for row in rows)
    return {
        "audits": audits,
        "hops": sum(row["hops"] for row in rows),
        "contributions": sum(row["contributions"] for row in rows),
        "differing": sum(row["differing"] for row in rows),
        "accused": accused,
        "suspicious": sum(row["suspicious"] for row in rows),
        "led": sum(row["led"] for row in rows),
        **{name: max(row[name] for row in rows) for name in SHARES},
        "false_alarms_below": 3.0 / audits if audits and not accused else None,
        "equal_to_the_bit": all(row["equal_to_the_bit"] for row in rows),
    }


@click.command()
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Keep pieces here, and go on from them.")
@click.option("--stop-after", type=click.FloatRange(min=0), help="Seconds after which no new piece is begun.")
@click.option("--wire", "wires", multiple=True, type=click.Choice(WIRES), help="[default: all]")
@click.option("--scene", "names", multiple=True, type=click.Choice([*QUIET]), help="[default: all]")
@click.option("--audited-steps", type=click.IntRange(min=3), default=AUDITED_STEPS, show_default=True)
@click.option("--smoke", is_flag=True, help="Two peers of a stage, for a few steps: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    keep: Path | None,
    stop_after: float | None,
    wires: tuple[str, ...],
    names: tuple[str, ...],
    audited_steps: int,
    smoke: bool,
    as_json: bool,
) -> None:
    """Audits of honest work in a mixed swarm."""
    scenes = [Scene(wire, name, audited_steps=audited_steps) for wire in wires or WIRES for name in names or QUIET]
    kinds = MACHINES
    if smoke:
        kinds = MACHINES[:1]
        scenes = [Scene("int8", "language", replicas=2, audited_steps=SMOKE_STEPS, restarts=False)]
    with KeptPieces(keep, total=2 * len(scenes), stop_after_s=stop_after) as pieces, machines(kinds) as started:
        rows = []
        for scene in scenes:
            audited, silent = (
                pieces.get(
                    f"{scene.wire}/{scene.name}/{scene.steps}/{'audited' if one else 'silent'}",
                    partial(run, scene, started, audited=one),
                )
                for one in (True, False)
            )
            rows.append(beside(scene, audited, silent))
    run_on = dict.fromkeys(scene.wire for scene in scenes)
    totals = {wire: total([row for row in rows if row["wire"] == wire]) for wire in run_on}
    everything = total(rows)
    if as_json:
        goals = {"audits": AUDITS_GOAL, "share": SHARE_GOAL}
        click.echo(json.dumps({"scenes": rows, "wires": totals, "all": everything, "goals": goals}))
        return
    for row in rows:
        click.echo(
            f"{row['wire']:5} {row['name']:16} {row['audits']:6} audits, {row['differing']:6} of other bits, "
            f"{row['suspicious']} suspicious, {row['bans'] + row['quarantines']} accused, largest honest share "
            f"{row['largest_honest_share']:.4f}, of what it moves {row['largest_moved_share']:.4f}, of biases "
            f"{row['largest_bias_share']:.4f}, loss {row['first_loss']:.3f} to {row['last_loss']:.4f}, "
            f"{'equal' if row['equal_to_the_bit'] else 'NOT EQUAL'} to the unverified run"
        )
    found = everything["false_alarms_below"]
    said = f"false alarms below {found:.1e} at 95 %" if found is not None else f"{everything['accused']} accused"
    click.echo(f"{everything['audits']} audits: {said}")


if __name__ == "__main__":
    main()
