"""Windows held against their replays: honest ones of many machines, and every lie about one.

    python -m benchmarks.windows.audits [--honest 2000] [--seeds 5] [--keep windows.jsonl] [--json]

A tiny run of one stage in int2, 10 inner steps of two microbatches a window. *Honest*: eight members, each on a machine
of its own (`benchmarks.machines`: instruction set, threads, where weights begin, batch whole or by sample), train
together; each window is replayed on another machine, and every ten windows two machines are killed between a window and
its replay, and started again. Scenes: a language, and two microbatches until they are known by heart. *Lies*: after
three honest windows of four members one of them says something else, in the kit's ways and others, and is replayed on a
machine like its own.
The bound is fraud's, of the worst of what is compared. Of a lie that some seed does not show as fraud the damage is the
held-out loss after `--damage-windows` in which that member lies always, less that where nobody does. *Time to ban*: of
a lie that shows, in windows, drawn with auditors' real hash chains, beside the law's mean.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.kept_pieces import KeptPieces
from benchmarks.machines import Kind, Machine, machines
from swarm.local.compute_pools import bound_pools

if TYPE_CHECKING:
    from peer.sim import TinyRun
    from swarm.checkpoint.state import StageState
    from swarm.core.settings import AveragingCodecName, ComputeDtype, RunSettings
    from swarm.model.stage import StageModel
    from swarm.optim.local_window import LocalWindow
    from verification.audit.tolerance import Comparison

Floats: TypeAlias = NDArray[np.float32]
Batches: TypeAlias = list[list[int]]
"""Numbers of the microbatches of each inner step."""

MACHINES = (
    Kind("native", 1),
    Kind("native", 2),
    Kind("avx2", 1),
    Kind("avx2", 2),
    Kind("native", 1),
    Kind("native", 2, by_sample=True),
    Kind("native", 1, weights_at=16, by_sample=True),
    Kind("avx2", 1, weights_at=32),
)
SCENES = ("language", "by_heart")
WINDOWS_A_PIECE = 10
"""In which each member's window is replayed once."""
MEMBERS, LIAR = 4, 0
HONEST_WINDOWS = 3
LAZY = (10, 20, 30, 50, 90)
"""Percent of inner steps."""
BENT = (0.03, 0.1, 0.3, 1.0, 3.0)
"""Of the root mean square of a window's way, or of a row's."""
DRAWN = 400
"""Times to ban."""
LOCAL_STEPS, EACH = 10, 2


@dataclass(frozen=True)
class Form:
    """What a run of windows is like."""

    scene: str = "language"
    codec: "AveragingCodecName" = "int2"
    compute_dtype: "ComputeDtype" = "fp32"
    num_layers: int = 1
    local_steps: int = LOCAL_STEPS

    def tiny(self, members: int) -> "TinyRun":
        """A run of one stage, of one layer."""
        from peer.sim import TinyRun
        from swarm.core.settings import AveragingSettings, CodecSettings

        return TinyRun(
            num_stages=1,
            num_replicas=members,
            microbatches_per_step=EACH,
            hidden_size=64,
            vocab_size=256,
            sequence_length=32,
            total_steps=60,
            learning_rate=3e-3,
            codecs=CodecSettings(averaging=self.codec),
            averaging=AveragingSettings(rule="mean", local_steps=self.local_steps),
            distinct_microbatches=2 if self.scene == "by_heart" else None,
        )

    def settings(self, tiny: "TinyRun") -> "RunSettings":
        """Of that run, computed so and of so many layers."""
        from swarm.model.families import canonical_config_json

        settings, count = tiny.settings(), self.num_layers
        config = json.loads(settings.model.config_json) | {"num_hidden_layers": count}
        model = replace(
            settings.model,
            config_json=canonical_config_json(config),
            stage_layers=((0, count),),
            compute_dtype=self.compute_dtype,
        )
        return replace(settings, model=model)


class World:
    """A run at one version after another, and what its members say."""

    def __init__(self, form: Form, *, members: int, seed: int) -> None:
        from swarm.averaging.parts import Parts
        from swarm.model.initial import initial_weights
        from swarm.model.stack import stage_layout
        from swarm.optim.stage_step import StageStep, first_state, stage_clip_norm
        from verification.replay.stage_replay import StageReplay

        self.form, self.tiny, self.members, self.seed = form, form.tiny(members), members, seed
        self.settings = form.settings(self.tiny)
        self.layout = stage_layout(self.settings.model, 0)
        self.parts = Parts.of(self.settings, self.layout)
        (weights,) = initial_weights(self.settings.model, seed, None)
        self.state: StageState = first_state(self.settings, self.layout, weights)
        self.before: StageState | None = None
        """Of the version before."""
        self._step = StageStep.of_run(self.settings, self.layout, clip_norm=stage_clip_norm(self.settings, 0))
        self.replay = StageReplay(self.settings, 0)

    @cached_property
    def model(self) -> "StageModel":
        """Of this process."""
        from swarm.model.stage import StageModel

        return StageModel(self.settings.model, 0)

    def batches(self, member: int, *, of_others: bool = False) -> Batches:
        """What the member is to do in the present window; `of_others`: what nobody is."""
        each = self.form.local_steps * EACH
        first = ((1 << 20) * of_others + self.state.version * self.members + member) * each
        return [[first + step * EACH + index for index in range(EACH)] for step in range(self.form.local_steps)]

    def window(
        self, model: "StageModel", batches: Batches, *, start: "StageState | None" = None, refilled: int = 0
    ) -> "LocalWindow":
        """Of these batches, from the present state; after them the last one's gradient so many times more."""
        from swarm.optim.carried_moments import Carried
        from swarm.optim.local_window import LocalWindow

        begun = start or self.state
        carried = Carried.of(begun)
        assert carried is not None
        window = LocalWindow(self.settings, self.layout)
        window.begin(begun.weights, begun.version, carried)
        gradient = np.zeros(self.layout.num_values, dtype=np.float32)
        for batch in batches:
            gradient = self._mean_gradient(model, window.weights, batch)
            window.take_mean(gradient)
        for _ in range(refilled):
            window.take_mean(gradient)
        window.end()
        return window

    def _mean_gradient(self, model: "StageModel", flat: Floats, batch: Sequence[int]) -> Floats:
        import torch

        from swarm.core.ids import MicrobatchId
        from swarm.optim.gradient_sum import GradientSum

        gradient, weights = GradientSum(self.layout.num_values), model.weights(flat.copy())
        for number in batch:
            both = self.tiny.batch(MicrobatchId(number), seed=self.seed)
            _, counted, saved = model.loss(weights, *map(torch.from_numpy, both), keep=True)
            assert saved is not None
            model.loss_backward(saved, gradient.flat)
            gradient.add_tokens(counted)
        gradient.close()
        return gradient.take_mean()

    def said(self, window: "LocalWindow") -> Floats:
        """All values of its contribution."""
        return np.concatenate([window.values(where) for where in self.parts])

    def encoded(self, said: Floats, member: int) -> list[memoryview]:
        from swarm.averaging.seeds import part_seeds
        from swarm.core.ids import PeerId, StageIndex, Version

        peer, version = PeerId(f"{member}"), Version(self.state.version)
        seeds = part_seeds("benchmark", StageIndex(0), version, peer, num_parts=len(self.parts))
        return [
            self.parts.contribution_codec(part).encode(np.ascontiguousarray(said[where]), seed=seed)
            for part, (where, seed) in enumerate(zip(self.parts, seeds, strict=True))
        ]

    def beside(self, claimed: Sequence[memoryview], replayed: Sequence[memoryview]) -> "Comparison":
        from verification.replay.compared import compared_window

        said, again = (self.replay.decoded_contribution(one) for one in (claimed, replayed))
        return compared_window(self.replay, said, again, None, 1.0)

    def advance(self, contributions: Sequence[Sequence[memoryview]]) -> None:
        """The round of these contributions."""
        from benchmarks.windows.training import averaged
        from swarm.averaging.certified_gradient import CertifiedGradient
        from swarm.core.canonical import digest

        version = self.state.version
        reduced, bodies = averaged(self.settings, self.parts, version, contributions)
        gradient = CertifiedGradient.of(self.parts, reduced, bodies)
        self.before, self.state = self.state, self._step.next(self.state, gradient, digest("version", [version])).state

    def held_out(self) -> float:
        """Nats a token, of 32 microbatches that nobody trains on."""
        from peer.sim.tiny_run import HELD_OUT

        return self.loss(range(HELD_OUT, HELD_OUT + 32))

    def loss(self, numbers: Sequence[int]) -> float:
        """Nats a token, of these microbatches."""
        import torch

        from swarm.core.ids import MicrobatchId

        weights, total, count = self.model.weights(self.state.weights), 0.0, 0
        for number in numbers:
            both = self.tiny.batch(MicrobatchId(number), seed=self.seed)
            loss, counted, _ = self.model.loss(weights, *map(torch.from_numpy, both), keep=False)
            total, count = total + loss, count + counted
        return total / count


# -- honest windows ---------------------------------------------------------------------------------------


def honest_piece(scene: str, seed: int, started: Sequence[Machine]) -> dict[str, Any]:
    """Windows of all machines, each replayed on another: the next, and further on in later windows."""
    world = World(Form(scene), members=len(started), seed=seed)
    models = [machine.model(world.settings.model, 0) for machine in started]
    found: list[tuple[float, str, bool]] = []
    grades: list[str] = []
    drifts: list[float] = []
    for number in range(WINDOWS_A_PIECE):
        windows = [world.window(model, world.batches(member)) for member, model in enumerate(models)]
        claimed = [world.encoded(world.said(window), member) for member, window in enumerate(windows)]
        if number == WINDOWS_A_PIECE // 2:
            for machine in started[seed % 4 :: 4]:
                machine.start_again()
        for member, mine in enumerate(claimed):
            other = models[(member + 1 + (number + seed) % (len(models) - 1)) % len(models)]
            replayed = world.window(other, world.batches(member))
            drifts.append(drift(world, windows[member], replayed))
            again = world.encoded(world.said(replayed), member)
            compared = world.beside(mine, again)
            is_equal = all(bytes(one) == bytes(two) for one, two in zip(mine, again, strict=True))
            found.append((compared.share, compared.reason.partition(":")[0], is_equal))
            grades.append(compared.grade.value)
        world.advance(claimed)
    largest = {name: max((share for share, of, _ in found if of == name), default=0.0) for name in RANGES}
    return {
        "windows": len(found),
        "differing": sum(not is_equal for _, _, is_equal in found),
        "suspicious": grades.count("suspicious"),
        "fraud": grades.count("fraud"),
        "largest_share": largest,
        "largest_drift": max(drifts),
        "median_drift": statistics.median(drifts),
        "held_out": world.held_out(),
    }


def drift(world: World, one: "LocalWindow", other: "LocalWindow") -> float:
    """Relative L2 of two ways, before anything is encoded: also where all codes come out the same."""
    way = slice(0, world.layout.num_values)
    mine, its = one.values(way).astype(np.float64), other.values(way).astype(np.float64)
    return float(np.linalg.norm(mine - its) / np.linalg.norm(its))


RANGES = ("way", "first moments", "second moments")


def honest_total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    largest = {name: max(row["largest_share"][name] for row in rows) for name in RANGES}
    return {
        **{name: sum(row[name] for row in rows) for name in ("windows", "differing", "suspicious", "fraud")},
        "largest_share": largest,
        "largest_drift": max(row["largest_drift"] for row in rows),
        "largest_held_out": max(row["held_out"] for row in rows),
        "least_held_out": min(row["held_out"] for row in rows),
    }


# -- lies -------------------------------------------------------------------------------------------------

Lie: TypeAlias = Callable[[World, Floats], Floats]
"""What the liar says, from what is true."""


def _left_out(percent: int, world: World, true: Floats, *, refilled: bool) -> Floats:
    steps = world.form.local_steps
    done = steps - steps * percent // 100
    batches = world.batches(LIAR)[:done]
    return world.said(world.window(world.model, batches, refilled=refilled * (steps - done)))


def _stale_start(world: World, true: Floats) -> Floats:
    return world.said(world.window(world.model, world.batches(LIAR), start=world.before))


def _other_data(world: World, true: Floats) -> Floats:
    return world.said(world.window(world.model, world.batches(LIAR, of_others=True)))


def _copied_from(member: int, world: World, true: Floats) -> Floats:
    """Which in a round it cannot: all have committed before parts are sent."""
    return world.said(world.window(world.model, world.batches(member)))


def _copied_result(world: World, true: Floats) -> Floats:
    assert world.before is not None
    return np.concatenate([world.before.weights - world.state.weights, true[world.layout.num_values :]])


def _bent(share: float, world: World, true: Floats, *, row: bool) -> Floats:
    """One layer's longest matrix, or the embedding's longest row, in a direction that is always the same."""
    said = true.copy()
    views = world.layout.views(said[: world.layout.num_values])
    if row:
        rows = views["model.embed_tokens.weight"]
        bent = rows[int(np.argmax(np.abs(true_rows(world, true)).sum(axis=1)))]
    else:
        bent = views["model.layers.0.mlp.down_proj.weight"]
    signs = np.float32(1) - 2 * np.random.default_rng(1).integers(2, size=bent.shape, dtype=np.int8)
    bent += np.float32(share) * np.sqrt(np.mean(np.square(bent))) * signs
    return said


def true_rows(world: World, true: Floats) -> Floats:
    return world.layout.views(true[: world.layout.num_values])["model.embed_tokens.weight"]


def _scaled(factor: float, name: str, world: World, true: Floats) -> Floats:
    size, said = world.layout.num_values, true.copy()
    where = {"way": slice(0, size), "first": slice(size, 2 * size), "second": slice(2 * size, None)}[name]
    said[where] *= np.float32(factor)
    return said


LIES: dict[str, Lie] = {
    **{f"lazy_{percent}": partial(_left_out, percent, refilled=False) for percent in LAZY},
    **{f"lazy_refilled_{percent}": partial(_left_out, percent, refilled=True) for percent in LAZY},
    "stale_start": _stale_start,
    "other_data": _other_data,
    "copied_from_another": partial(_copied_from, 1),
    "copied_result": _copied_result,
    **{f"bent_layer_{share:g}": partial(_bent, share, row=False) for share in BENT},
    **{f"bent_row_{share:g}": partial(_bent, share, row=True) for share in BENT},
    "sign_flip": partial(_scaled, -1.0, "way"),
    "ipm": partial(_scaled, -0.5, "way"),
    "zeros": partial(_scaled, 0.0, "way"),
    "negated_moments": partial(_scaled, -1.0, "first"),
    "small_moments": partial(_scaled, 0.01, "second"),
}


def trained(seed: int, windows: int, lie: Lie | None, *, lies_from: int = 0) -> World:
    """A run of so many windows, in which one member lies from one on, once there is a version before."""
    world = World(Form(), members=MEMBERS, seed=seed)
    for number in range(windows):
        contributions = []
        for member in range(MEMBERS):
            said = world.said(world.window(world.model, world.batches(member)))
            if lie is not None and member == LIAR and number >= max(1, lies_from):
                said = lie(world, said)
            contributions.append(world.encoded(said, member))
        world.advance(contributions)
    return world


def lies_beside(seed: int, names: Sequence[str] = tuple(LIES)) -> dict[str, dict[str, Any]]:
    """Each of these lies beside its replay, after some honest windows."""
    world = trained(seed, HONEST_WINDOWS, None)
    true = world.said(world.window(world.model, world.batches(LIAR)))
    replayed = world.encoded(true, LIAR)
    found = {}
    for name in names:
        compared = world.beside(world.encoded(LIES[name](world, true), LIAR), replayed)
        found[name] = {"share": compared.share, "grade": compared.grade.value}
    return found


def damage(name: str, seed: int, windows: int) -> float:
    """Nats a token by which the loss is higher at the end, where one of four lies so, always."""
    return trained(seed, windows, LIES[name]).held_out() - trained(seed, windows, None).held_out()


def times_to_ban(seed: int) -> list[int]:
    """Windows until a lie that every replay shows is drawn, by three honest auditors at the manifest's budget."""
    from swarm.core.audit.hash_chain import HashChain
    from swarm.core.canonical import digest
    from swarm.core.ids import PeerId
    from verification.audit.draws import contribution_rate, draw

    rate, times = contribution_rate(MEMBERS), []
    for number in range(DRAWN):
        seeds = [digest("auditor", [seed, number, auditor]) for auditor in range(MEMBERS - 1)]
        chains = [HashChain(one, 1024) for one in seeds]
        for version in range(1024):
            made = digest("window", [seed, number, version])
            draws = (
                draw(chain.reveal(version), made, auditor=PeerId(f"{auditor}"), target=PeerId("liar"))
                for auditor, chain in enumerate(chains)
            )
            if any(one.hits_contribution(rate) for one in draws):
                times.append(version + 1)
                break
    return times


def lies_table(pieces: KeptPieces, seeds: int, damage_windows: int) -> dict[str, dict[str, Any]]:
    found = [pieces.get(f"lies/{seed}", partial(lies_beside, seed)) for seed in range(seeds)]
    table = {}
    for name in LIES:
        rows = [one[name] for one in found]
        is_hidden = any(row["grade"] != "fraud" for row in rows)
        harm = [
            pieces.get(f"damage/{name}/{seed}/{damage_windows}", partial(damage, name, seed, damage_windows))
            for seed in range(seeds if is_hidden else 0)
        ]
        table[name] = {
            "least_share": min(row["share"] for row in rows),
            "largest_share": max(row["share"] for row in rows),
            "fraud": sum(row["grade"] == "fraud" for row in rows),
            "of": len(rows),
            "damage_nats": statistics.mean(harm) if harm else None,
        }
    return table


@click.command()
@click.option("--honest", type=click.IntRange(min=0), default=2000, show_default=True, help="Windows, at least.")
@click.option("--seeds", type=click.IntRange(min=0), default=5, show_default=True, help="Of lies.")
@click.option("--damage-windows", type=click.IntRange(min=2), default=20, show_default=True)
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Keep pieces here, and go on from them.")
@click.option("--stop-after", type=click.FloatRange(min=0), help="Seconds after which no new piece is begun.")
@click.option("--smoke", is_flag=True, help="Two machines, one piece, one seed, a few lies: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    honest: int,
    seeds: int,
    damage_windows: int,
    keep: Path | None,
    stop_after: float | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Replays of windows: of honest ones, and of lies."""
    bound_pools(1)
    kinds = MACHINES[:2] if smoke else MACHINES
    if smoke:
        honest, seeds, damage_windows = 1, 1, 2
    num_pieces = -(-honest // (WINDOWS_A_PIECE * len(kinds)))
    total = num_pieces + seeds
    with KeptPieces(keep, total=total, stop_after_s=stop_after) as pieces, machines(kinds if honest else ()) as started:
        rows = []
        for number in range(num_pieces):
            scene = SCENES[number % len(SCENES)]
            rows.append(pieces.get(f"honest/{scene}/{number}", partial(honest_piece, scene, number, started)))
        result: dict[str, Any] = {"honest": honest_total(rows) if rows else None}
        if seeds:
            from verification.audit.draws import contribution_rate, expected_time_to_ban

            result["lies"] = lies_table(pieces, seeds, damage_windows)
            times = pieces.get("times", partial(times_to_ban, 0))
            predicted = expected_time_to_ban(contribution_rate(MEMBERS), MEMBERS - 1)
            result["windows_to_ban"] = {"predicted": predicted, "observed": statistics.mean(times), "drawn": len(times)}
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"honest: {result['honest']}")
    for name, row in result.get("lies", {}).items():
        harm = "" if row["damage_nats"] is None else f", damage {row['damage_nats']:+.3f} nats"
        click.echo(
            f"{name:22} fraud {row['fraud']} of {row['of']}, {row['least_share']:.2f} to {row['largest_share']:.2f} of "
            f"the bound{harm}"
        )
    if seeds:
        click.echo(f"windows to ban: {result['windows_to_ban']}")


if __name__ == "__main__":
    main()
