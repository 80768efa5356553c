"""An averaging round measured against the open engine and the trusted cluster, all in one run.

    python -m benchmarks.round.averaging --peers 3 --params 25000000 [--json]

Sides: `ours` (encrypted p2pd, signed rounds, every byte checked against its digest), `hivemind` (DecentralizedAverager,
encrypted p2pd) and `gloo` (torch.distributed, plain TCP). Each peer is a process of its own on this machine; codecs
and sides take turns, forth and back. Seconds are those of the slowest peer: ours from the closing of the step, the
others' from the word to begin, to the averaged vector in fp32 at every peer.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.programs import end_when_told, told_afterwards
from benchmarks.round.averaging_vectors import write_vectors
from benchmarks.round.orders import Fields, OrderFailed, Program, together
from swarm.local.compute_pools import POOLS

OURS = ("fp32", "bf16", "int8", "int4", "topk")
HIVEMIND = ("NONE", "FLOAT16", "UNIFORM_8BIT", "QUANTILE_8BIT", "BLOCKWISE_8BIT")
GLOO = ("fp32",)
SMOKE_PARAMS = 300_000
PIECES = ("encode", "hash", "wire", "decode")
PIECE_TIMES = 3
"""So often each turn."""

GOAL_INT8 = 4.0
GOAL_BF16 = 3.0
GOAL_PIECES = 1.3
MULTIPLES = {
    "round_to_pieces": "its pieces each by itself",
    "round_to_own_pieces": "its own encoding, hashing, moving and decoding, added up",
    "round_to_busy": "the time in it in which a peer encodes, hashes, moves or decodes",
}
"""Readings of one goal, by their names among the figures."""

WARM_UP_ROUNDS = {"ours": 6}
"""Of each turn; of other sides 1. Ours keeps what it reduced for audits; after some steps each round finds the memory
that an old one leaves."""
SLOW_S = 4.0
"""A codec whose rounds take longer is measured in one pass only."""
MAX_FAILURES = 2
START_S = 60.0
ORDER_S = 45.0


@dataclass
class Cell:
    """What was measured of one side in one codec."""

    rounds: list[Fields] = field(default_factory=list)
    pieces: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    relative_error: float = 0.0
    replicas_equal: bool = True
    error: str = ""
    failures: int = 0

    @property
    def is_done(self) -> bool:
        """Further rounds would take too long, or fail."""
        return self.failures >= MAX_FAILURES or any(one["seconds"] > SLOW_S for one in self.rounds)

    def figures(self) -> Fields:
        if not self.rounds:
            return {"failed": self.error or "no round was measured"}
        found: Fields = {
            "seconds": statistics.median(one["seconds"] for one in self.rounds),
            "bytes": statistics.median(one["bytes"] for one in self.rounds),
            "relative_error": self.relative_error,
            "replicas_equal": self.replicas_equal,
            "all_seconds": [one["seconds"] for one in self.rounds],
        }
        stepped = [one["step_seconds"] for one in self.rounds if "step_seconds" in one]
        if stepped:
            found["step_seconds"] = statistics.median(stepped)
        busy = [one["busy"] for one in self.rounds if "busy" in one]
        if busy:
            found["busy_seconds"] = {kind: statistics.median(one.get(kind, 0.0) for one in busy) for kind in busy[0]}
            for what, kind in (("round_to_busy", "all"), ("round_to_own_pieces", "pieces")):
                found[what] = statistics.median(
                    one["seconds"] / one["busy"][kind] for one in self.rounds if "busy" in one
                )
        if self.pieces:
            found["pieces"] = {piece: statistics.median(seconds) for piece, seconds in self.pieces.items()}
            found["pieces_seconds"] = sum(found["pieces"].values())
            found["round_to_pieces"] = found["seconds"] / found["pieces_seconds"]
        cpu: dict[str, float] = defaultdict(float)
        for one in self.rounds:
            for name, seconds in one.get("cpu", {}).items():
                cpu[name] += seconds / len(self.rounds)
        if cpu:
            found["cpu_seconds_of_all_peers"] = dict(sorted(cpu.items()))
        return found


class Side:
    """The programs of one side, one for each peer, and how they are taken through rounds."""

    def __init__(self, name: str, module: str, extra: Sequence[str], codecs: Sequence[str], bench: "Bench") -> None:
        self.name = name
        self.codecs = codecs
        self.cells = {codec: Cell() for codec in codecs}
        self._bench = bench
        self._opened = 0
        folder = bench.folder / name
        folder.mkdir(exist_ok=True)
        threads = dict.fromkeys(POOLS, str(bench.threads))
        environment = {**threads, "HOMESWARM_LOG": "warning", "HIVEMIND_LOGLEVEL": "ERROR"}
        has_host = name == "ours"
        for number in range(bench.peers + has_host):
            arguments = ["-m", module, str(number), str(bench.peers), str(bench.folder), *extra]
            with told_afterwards():
                bench.programs.append(Program(arguments, folder / f"{number}.log", environment))
        self._everyone = bench.programs[-bench.peers - has_host :]
        self.programs = self._everyone[: bench.peers]

    def join(self) -> None:
        """The peers find each other."""
        if self.name == "gloo":
            together(self.programs, "join", timeout_s=START_S)
        elif self.name == "hivemind":
            first, *others = self.programs
            addresses = together([first], "listen", timeout_s=START_S, initial_peers=[])[0]["addresses"]
            together(others, "listen", timeout_s=START_S, initial_peers=addresses)
        else:
            found = [one["addresses"] for one in together(self._everyone, "listen", timeout_s=START_S)]
            together(self.programs, "connect", timeout_s=START_S, addresses=found)

    def turn(self, codec: str, rounds: int) -> None:
        """Some rounds to warm up and `rounds` that count, while it is of use."""
        cell = self.cells[codec]
        if cell.is_done:
            return
        try:
            if self.name != "gloo":
                self._opened += 1
                self._all("open", codec=codec, name=f"bench{codec.replace('_', '')}{self._opened}")
            warm_up = WARM_UP_ROUNDS.get(self.name, 1)
            for number in range(warm_up + rounds):
                self._round(cell, number, counts=number >= warm_up, is_last=number == warm_up + rounds - 1)
            if self.name == "ours":
                for piece in PIECES:
                    timed = [max(one["seconds"] for one in self._all("piece", piece=piece)) for _ in range(PIECE_TIMES)]
                    cell.pieces[piece] += timed
        except OrderFailed as error:
            cell.error, cell.failures = str(error), cell.failures + 1
        if self.name != "gloo":
            with contextlib.suppress(OrderFailed):
                self._all("close")

    def _round(self, cell: Cell, number: int, *, counts: bool, is_last: bool) -> None:
        self._all("ready")
        written = _p2pd_written(self.programs) if self.name == "hivemind" else 0
        answers = self._all("round")
        began, ended = min(one["began"] for one in answers), max(one["ended"] for one in answers)
        one: Fields = {"seconds": ended - began}
        if self.name == "ours":
            one["bytes"] = sum(answer["bytes"] for answer in answers)
            one["step_seconds"] = max(answer["stepped"] for answer in answers) - ended
            one["busy"] = {
                kind: statistics.mean(answer["busy"].get(kind, 0.0) for answer in answers)
                for kind in sorted({kind for answer in answers for kind in answer["busy"]})
            }
            one["cpu"] = defaultdict(float)
            for answer in answers:
                for name, seconds in answer["cpu"].items():
                    one["cpu"][name] += seconds
        elif self.name == "hivemind":
            # A p2pd writes what its peer sends to the network, and what it receives from there to its peer.
            one["bytes"] = (_p2pd_written(self.programs) - written) // 2
        else:
            one["bytes"] = 2 * (len(self.programs) - 1) * 4 * self._bench.params  # of a ring
        if counts:
            cell.rounds.append(one)
        checks = self._all("check") if number == 0 or is_last else []
        for what in ("digest", "version"):
            if len({check.get(what) for check in checks}) > 1:
                cell.replicas_equal = False
        if number == 0:  # under error feedback later rounds also say what the first left out
            cell.relative_error = max(check["relative_error"] for check in checks)

    def _all(self, what: str, **fields: Any) -> list[Fields]:
        return together(self.programs, what, timeout_s=ORDER_S, **fields)


@dataclass
class Bench:
    """What all sides share."""

    folder: Path
    peers: int
    params: int
    threads: int
    rule: str
    calls: bool
    programs: list[Program] = field(default_factory=list)

    def side(self, name: str, codecs: Sequence[str]) -> Side:
        extra = [str(self.params), self.rule, *(["calls"] if self.calls else [])] if name == "ours" else []
        return Side(name, f"benchmarks.round.averaging_{name}", extra, codecs, self)


def _p2pd_written(programs: Sequence[Program]) -> int:
    """Bytes that the p2pds below these programs have written."""
    written = 0
    for program in programs:
        for child in psutil.Process(program.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if "p2pd" in child.name():
                    written += child.io_counters().write_chars
    return written


@contextlib.contextmanager
def ended_with(bench: Bench) -> Iterator[Bench]:
    """All programs are ended, at the latest at the end."""
    try:
        yield bench
    finally:
        for program in bench.programs:
            program.dismiss()
        for program in bench.programs:
            program.end()


def measure(
    bench: Bench, codecs: dict[str, Sequence[str]], *, rounds: int, passes: int, say: Callable[[str], None]
) -> dict[str, dict[str, Fields]]:
    """Figures by side and codec."""
    sides = [bench.side(name, wanted) for name, wanted in codecs.items() if wanted]
    for side in sides:
        side.join()
    turns = [(side, codec) for side in sides for codec in side.codecs]
    for number in range(passes):
        # Forth and back: a slow trend favours nobody.
        for side, codec in turns if number % 2 == 0 else reversed(turns):
            began = time.monotonic()
            side.turn(codec, rounds)
            say(f"pass {number + 1} of {passes}: {side.name} {codec}, {time.monotonic() - began:.1f} s")
    return {side.name: {codec: cell.figures() for codec, cell in side.cells.items()} for side in sides}


def goals(result: dict[str, dict[str, Fields]]) -> list[tuple[str, float, float, bool]]:
    """(what, reached, goal, whether it is met) of each goal that these figures can show."""
    found = []
    ours, theirs = result.get("ours", {}), result.get("hivemind", {})
    eight = [cell for codec, cell in theirs.items() if "8BIT" in codec and "seconds" in cell]
    int8, bf16, fp16 = ours.get("int8", {}), ours.get("bf16", {}), theirs.get("FLOAT16", {})
    if eight and "seconds" in int8:
        fastest = min(eight, key=lambda cell: float(cell["seconds"]))
        ratio = fastest["seconds"] / int8["seconds"]
        found.append(("int8: times faster than hivemind's fastest 8-bit codec", ratio, GOAL_INT8, ratio >= GOAL_INT8))
        ratio = int8["relative_error"] / fastest["relative_error"]
        found.append(("int8: relative error, as a share of that codec's", ratio, 1.0, ratio <= 1.0))
    if "seconds" in bf16 and "seconds" in fp16:
        ratio = fp16["seconds"] / bf16["seconds"]
        found.append(("bf16: times faster than hivemind's fp16", ratio, GOAL_BF16, ratio >= GOAL_BF16))
    for codec, cell in ours.items():
        for name, what in MULTIPLES.items():
            if name in cell:
                ratio = cell[name]
                found.append((f"{codec}: round, as a multiple of {what}", ratio, GOAL_PIECES, ratio <= GOAL_PIECES))
    return found


def show(result: dict[str, dict[str, Fields]]) -> None:
    click.echo(f"{'side':9} {'codec':15} {'seconds':>8} {'step':>6} {'MB':>7} {'error':>9}  replicas")
    for side, cells in result.items():
        for codec, cell in cells.items():
            if "failed" in cell:
                click.echo(f"{side:9} {codec:15} failed: {cell['failed'][:90]}")
                continue
            step = f"{cell['step_seconds']:6.3f}" if "step_seconds" in cell else 6 * " "
            click.echo(
                f"{side:9} {codec:15} {cell['seconds']:8.3f} {step} {cell['bytes'] / 1e6:7.0f} "
                f"{cell['relative_error']:9.2e}  {'equal' if cell['replicas_equal'] else 'differ'}"
            )
    for codec, cell in result.get("ours", {}).items():
        if "pieces" in cell:
            pieces = ", ".join(f"{name} {seconds:.3f}" for name, seconds in cell["pieces"].items())
            click.echo(f"{codec} by itself, all peers at once: {pieces}; sum {cell['pieces_seconds']:.3f} s")
        if "busy_seconds" in cell:
            spans = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in cell["busy_seconds"].items())
            click.echo(f"{codec} in a round, mean of the peers: {spans} s")
        if "cpu_seconds_of_all_peers" in cell:
            spent = sorted(cell["cpu_seconds_of_all_peers"].items(), key=lambda item: -item[1])
            click.echo("  CPU seconds: " + ", ".join(f"{name} {value:.3f}" for name, value in spent if value >= 0.001))
    for what, reached, goal, met in goals(result):
        click.echo(f"{'met ' if met else 'MISS'} {what}: {reached:.2f} (goal {goal:g})")


@click.command()
@click.option("--peers", type=click.IntRange(2, 16), default=3, show_default=True)
@click.option("--params", type=click.IntRange(min=1000), default=25_000_000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Timed, each turn.")
@click.option("--passes", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each codec.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of each peer.")
@click.option("--rule", type=click.Choice(["mean", "centered_clip"]), default="mean", show_default=True)
@click.option("--ours", default=",".join(OURS), show_default=True, help="Codecs; empty for none, as below.")
@click.option("--hivemind", default=",".join(HIVEMIND), show_default=True)
@click.option("--gloo", default=",".join(GLOO), show_default=True)
@click.option("--calls", is_flag=True, help="CPU seconds of single calls of ours, which costs a round 2 to 3 %.")
@click.option("--smoke", is_flag=True, help="One small round of two peers: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    peers: int,
    params: int,
    rounds: int,
    passes: int,
    threads: int,
    rule: str,
    ours: str,
    hivemind: str,
    gloo: str,
    calls: bool,
    smoke: bool,
    as_json: bool,
) -> None:
    """Seconds, bytes and error of averaging rounds: ours, hivemind's, gloo's."""
    end_when_told()
    if smoke:
        peers, params, rounds, passes, ours, hivemind, gloo = 2, SMOKE_PARAMS, 1, 1, "int8", "", ""
    codecs = {
        name: [codec for codec in wanted.split(",") if codec]
        for name, wanted in (("ours", ours), ("hivemind", hivemind), ("gloo", gloo))
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_vectors(folder, peers=peers, params=params)
        with ended_with(Bench(folder, peers, params, threads, rule, calls)) as bench:
            try:
                result = measure(
                    bench, codecs, rounds=rounds, passes=passes, say=lambda line: click.echo(line, err=True)
                )
            except OrderFailed as error:
                raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
        click.echo(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    broken = [f"ours {codec}: {cell['failed']}" for codec, cell in result.get("ours", {}).items() if "failed" in cell]
    if broken:
        raise click.ClickException("; ".join(broken))


if __name__ == "__main__":
    main()
