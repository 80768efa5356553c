"""Windows in bf16 between machines of several makes: honest ones replayed by each other, and lies before them.

    python -m benchmarks.windows.numeric_classes --keep classes.jsonl [--pieces 12] [--first 0] [--json]

Members of a tiny run of one stage compute as classes of `benchmarks.verification.numeric_classes`, and every class
replays what every other says of the same window, in each codec, as an auditor does: with own errors, which are replays
of the whole window that round otherwise, and with an accuser's caution. A piece is one run of a form of its own: a
language or two microbatches until they are known by heart, one layer or four, 10 inner steps or 30; three of its
windows are audited. In the last one every lie of `benchmarks.windows.audits` is told by one class before another.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.kept_pieces import KeptPieces
from benchmarks.windows.audits import LIAR, LIES, LOCAL_STEPS, Floats, Form, World
from swarm.local.compute_pools import bound_pools

if TYPE_CHECKING:
    from swarm.core.settings import AveragingCodecName
    from verification.audit.tolerance import Comparison
    from verification.replay.own_error import Errors

CLASSES = ("native", "lanes-8", "math-attention", "plain-attention", "tensor-16-plain")
COSTLY = ("tensor-16-plain",)
"""To emulate: they replay windows of one layer and 10 steps alone, and tell no lies."""
CODECS: tuple["AveragingCodecName", ...] = ("fp32", "bf16", "int8", "int4", "int2")
FORMS = (
    Form("language", compute_dtype="bf16"),
    Form("by_heart", compute_dtype="bf16"),
    Form("language", compute_dtype="bf16", num_layers=4),
    Form("by_heart", compute_dtype="bf16", num_layers=4),
    Form("language", compute_dtype="bf16", local_steps=30),
    Form("by_heart", compute_dtype="bf16", local_steps=30),
)
"""Of pieces, in turn; each run's own codec changes from one round of them to the next."""
AUDITED = {10: (1, 8, 40), 30: (1, 4, 20)}
"""Versions whose windows are replayed, by inner steps; the last ends the piece."""
MEMBERS = 2


class Auditor:
    """A class's replays of one window of the liar-to-be, in every codec."""

    def __init__(self, name: str, worlds: dict[str, World], run: World) -> None:
        """`run` is the one of the worlds, by codec, whose state all have."""
        self.name, self._worlds, self._run = name, worlds, run
        self._drawn: list[Floats] = []
        self._known: dict[str, list[Errors]] = {codec: [] for codec in worlds}
        with self._at_work():
            self.true = self._computed()
        self.says = {codec: self.decoded(codec, self.true) for codec in worlds}

    def _at_work(self) -> AbstractContextManager[None]:
        from benchmarks.verification.numeric_classes import computing_as

        return computing_as(self.name)

    def _computed(self) -> Floats:
        return self._run.said(self._run.window(self._run.model, self._run.batches(LIAR)))

    def decoded(self, codec: str, said: Floats) -> Floats:
        """As a contribution says it."""
        world = self._worlds[codec]
        return world.replay.decoded_contribution(world.encoded(said, LIAR))

    def graded(self, codec: str, claimed: Floats) -> "Comparison":
        """What it thinks of a window's values, as decoded."""
        from verification.audit.tolerance import CAUTION
        from verification.replay.compared import compared_window, past_doubt

        replay, again = self._worlds[codec].replay, self.says[codec]
        errors = self._errors(codec)
        with self._at_work():  # draws round within it
            return past_doubt(lambda own: compared_window(replay, claimed, again, own, CAUTION), lambda: next(errors))

    def _errors(self, codec: str) -> Iterator["Errors"]:
        """Own errors of draws from the first on, each made once, within the draw's own rounding."""
        from verification.replay.compared import errors_of_window

        known = self._known[codec]
        for draw in count():
            if draw == len(self._drawn):
                self._drawn.append(self._computed())
            if draw == len(known):
                other = self.decoded(codec, self._drawn[draw])
                known.append(errors_of_window(self._worlds[codec].replay, other, self.says[codec]))
            yield known[draw]

    def told(self, lie: str) -> Floats:
        """What it says in place of what is true."""
        with self._at_work():
            return LIES[lie](self._run, self.true)


def piece(number: int, classes: Sequence[str]) -> dict[str, Any]:
    """Audits of windows of one run, whose other windows are computed as the first class does."""
    form, own_codec = FORMS[number % len(FORMS)], CODECS[number // len(FORMS) % len(CODECS)]
    worlds = {codec: World(replace(form, codec=codec), members=MEMBERS, seed=number) for codec in CODECS}
    run, audited, seen = worlds[own_codec], AUDITED[form.local_steps], Seen()
    for version in range(audited[-1] + 1):
        for world in worlds.values():
            world.before, world.state = run.before, run.state
        others = [run.said(run.window(run.model, run.batches(member))) for member in range(1, MEMBERS)]
        if version in audited:
            auditors = [Auditor(name, worlds, run) for name in classes]
            quick = [one for one in auditors if one.name not in COSTLY]
            is_small = form.num_layers == 1 and form.local_steps == LOCAL_STEPS
            seen.honest(auditors if is_small else quick, auditors)
            if version == audited[-1]:
                seen.losses.append(run.loss(run.batches(LIAR)[0]))
                seen.lies(*(quick[(number + place) % len(quick)] for place in (0, 1 + number % 2)))
            mine = auditors[version % len(classes)].true
        else:
            mine = run.said(run.window(run.model, run.batches(LIAR)))
        run.advance([run.encoded(true, member) for member, true in enumerate([mine, *others])])
    name = f"{form.scene}, {form.num_layers} layers, {form.local_steps} steps"
    return {"form": name, "own_codec": own_codec, "audits": seen.audits, "lies": seen.told, "losses": seen.losses}


class Seen:
    """What audits of one run came to."""

    def __init__(self) -> None:
        self.audits: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.losses: list[float] = []
        """Nats a token of a batch to be trained on, in the last window."""

    def honest(self, auditors: Sequence[Auditor], claimants: Sequence[Auditor]) -> None:
        for one, other, codec in product(auditors, claimants, CODECS):
            if one is other:
                continue
            found = _seen(one.graded(codec, other.says[codec]))
            self.audits.append({"pair": f"{one.name}_{other.name}", "codec": codec, **found})

    def lies(self, auditor: Auditor, liar: Auditor) -> None:
        for lie in LIES:
            said = liar.told(lie)
            for codec in CODECS:
                found = _seen(auditor.graded(codec, liar.decoded(codec, said)))
                self.told.append({"lie": lie, "codec": codec, **found})


def _seen(found: "Comparison") -> dict[str, Any]:
    return {
        "of": found.reason.partition(":")[0],
        "error": found.measured,
        "own_error": found.own_error,
        "share": found.share,
        "grade": found.grade.value,
    }


def summed(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Audits by pair, by codec and form, and by what is nearest its bound; lies by kind and codec."""
    honest: dict[str, dict[str, list[dict[str, Any]]]] = {"pairs": defaultdict(list), "rows": defaultdict(list)}
    told: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in pieces:
        for audit in one["audits"]:
            honest["pairs"][audit["pair"]].append(audit)
            honest["rows"][f"{audit['codec']}, {one['form']}"].append(audit)
        for lie in one["lies"]:
            told[f"{lie['lie']}, {lie['codec']}, {one['form'].partition(',')[0]}"].append(lie)
    return {
        "pieces": len(pieces),
        "losses": {f"{one['form']}, {number}": one["losses"] for number, one in enumerate(pieces)},
        **{by: {key: _together(audits) for key, audits in sorted(found.items())} for by, found in honest.items()},
        "all": _together([audit for one in pieces for audit in one["audits"]]),
        "lies": {
            key: {
                "fraud": sum(one["grade"] == "fraud" for one in found),
                "honest": sum(one["grade"] == "honest" for one in found),
                "of": len(found),
                "least_share": min(one["share"] for one in found),
            }
            for key, found in told.items()
        },
    }


def _together(audits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "audits": len(audits),
        "accused": sum(one["grade"] == "fraud" for one in audits),
        "suspicious": sum(one["grade"] == "suspicious" for one in audits),
        "with_own_error": sum(one["own_error"] is not None for one in audits),
        "largest_share": max((one["share"] for one in audits), default=0.0),
        "largest_error": max((one["error"] for one in audits), default=0.0),
        "largest_own_error": max((one["own_error"] or 0.0 for one in audits), default=0.0),
    }


@click.command()
@click.option("--pieces", "num_pieces", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first piece.")
@click.option("--classes", default=",".join(CLASSES), show_default=True, help="Their names.")
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Keep pieces here, and go on from them.")
@click.option("--stop-after", type=click.FloatRange(min=0), help="Seconds after which no new piece is begun.")
@click.option("--json", "as_json", is_flag=True)
def main(num_pieces: int, first: int, classes: str, keep: Path | None, stop_after: float | None, as_json: bool) -> None:
    """Replays of windows in bf16, by classes of machines."""
    bound_pools(1)
    names = tuple(classes.split(","))
    with KeptPieces(keep, total=num_pieces, stop_after_s=stop_after) as pieces:
        numbers = range(first, first + num_pieces)
        found = summed([pieces.get(f"{number}", partial(piece, number, names)) for number in numbers])
    click.echo(json.dumps(found, indent=None if as_json else 2))


if __name__ == "__main__":
    main()
