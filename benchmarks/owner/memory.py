"""The memory of peers under load, beside what they reckoned: `python -m benchmarks.owner.memory`.

For each row a run of its own: a host, and two peers of each of two stages, which say before they join what they need at
most. Held against that: the most memory that the kernel counted for a daemon with its p2pd and its guard, of what it
cannot take from them (RSS without mapped files), looked at every twentieth of a second.
"""

import argparse
import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.programs import Program
from benchmarks.training_throughput import READY_S, Events, running
from peer.owner.limits import held_bytes
from swarm.manifest.file import read_manifest
from swarm.manifest.model import stage_num_parameters
from swarm.model.presets import preset_config

GIB = 1 << 30
LOOK_EVERY_S = 0.05
BAR = 1.15
STAGES, PEERS = 2, 2

MANIFEST = """\
[run]
name = "memory"
trust = "{trust}"
[model]
{model}
stages = {stages}
[data]
max_text_mb = 4
[batch]
microbatch_size = {microbatch_size}
target_tokens = {target_tokens}
[optimizer]
total_steps = 100000
{optimizer}
[codecs]
averaging = "{codec}"
[averaging]
delay = {delay}
sync_steps = 1
[audits]
agreements_to_promote = 0
contribution_budget = 1.0
[checkpoint]
every_steps = 8
snapshot_every = 8
[limits]
founders_per_stage = {peers}
max_peers_per_stage = {peers}
"""
"""Among strangers every contribution is audited: by the default share few peers have audited one after so few steps,
and what a peer reckons is for one that does."""


@dataclass(frozen=True)
class Row:
    """What is measured, beside the settings that all rows have."""

    trust: str = "friends"
    moments: str = "fp32"
    recompute: bool = False
    vocab_size: int = 256
    only: int | None = None
    """The stage that is meant; None: both."""


ROWS = {
    "full": Row(),
    "int8 moments": Row(moments="int8"),
    "public": Row(trust="public"),
    "recompute": Row(recompute=True),
    "vocabulary of 128 k": Row(vocab_size=1 << 17, only=STAGES - 1),
}


@dataclass(frozen=True)
class Shape:
    """Of the model of a row; of one with a large vocabulary both are smaller."""

    hidden_size: int
    num_layers: int

    def config(self, vocab_size: int) -> str:
        """A Llama, as a TOML table."""
        narrower = 4 if vocab_size > 1 << 16 else 1
        fields: dict[str, object] = {
            **preset_config("tiny", vocab_size),
            "hidden_size": self.hidden_size // narrower,
            "intermediate_size": 4 * self.hidden_size // narrower,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": self.hidden_size // narrower // 8,
        }
        said = ", ".join(f"{name} = {_toml(value)}" for name, value in fields.items() if value is not None)
        return f"config = {{ {said} }}"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)


def held_with_started(process: psutil.Process) -> tuple[int, int]:
    """Bytes that a process holds, and that all holds which it has started. Raises psutil.Error if it is gone."""
    own, started, itself = held_bytes(process), 0, process.cmdline()
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            if child.cmdline() != itself:  # else it is about to become another program, and has the daemon's memory
                started += held_bytes(child)
    return own, started


@dataclass
class Watched:
    """One peer and the most that it held."""

    folder: Path
    stage: int
    process: psutil.Process
    own_bytes: int = 0
    """Of the daemon alone."""
    p2pd_bytes: int = 0
    """Of all that it started."""
    all_bytes: int = 0
    mapped_bytes: int = 0
    """Of files, in the daemon: libraries, and what is cold."""

    def look(self) -> None:
        own, started = held_with_started(self.process)
        self.own_bytes, self.p2pd_bytes = max(self.own_bytes, own), max(self.p2pd_bytes, started)
        self.all_bytes = max(self.all_bytes, own + started)
        self.mapped_bytes = max(self.mapped_bytes, self.process.memory_info().rss - own)

    def reckoned(self) -> tuple[int, str]:
        """Bytes that it said it needs at most, and its items."""
        said = re.search(r"at most ([\d.]+) GiB of memory: (.*)", (self.folder / "daemon.log").read_text())
        assert said is not None, f"{self.folder} reckoned nothing"
        return round(float(said[1]) * GIB), said[2]

    @property
    def beside_the_stage_bytes(self) -> int:
        """Of what it reckoned, libraries and p2pd."""
        items = self.reckoned()[1]
        found = [re.search(rf"{name} ([\d.]+) GiB", items) for name in ("libraries", "p2pd")]
        return sum(round(float(one[1]) * GIB) for one in found if one is not None)


@dataclass(frozen=True)
class Measured:
    """Of one run."""

    peers: list[Watched]
    host_bytes: int
    """The most that its host held, with all that it has started; it does not depend on the model."""


def manifest_of(options: argparse.Namespace, row: Row) -> str:
    """Of a row's run."""
    model = Shape(options.hidden_size, options.layers).config(row.vocab_size)
    return MANIFEST.format(
        trust=row.trust,
        model=model + ("\nrecompute = true" if row.recompute else ""),
        stages=STAGES,
        peers=options.peers,
        microbatch_size=options.microbatch_size,
        target_tokens=options.target_tokens,
        optimizer=f'moments = "{row.moments}"',
        codec=options.codec,
        delay=options.delay,
    )


def measure(options: argparse.Namespace, root: Path, row: Row) -> Measured:
    """A run of a row's that has trained for so many steps."""
    manifest = root / "run.toml"
    manifest.write_text(manifest_of(options, row))
    stages = [number // options.peers for number in range(STAGES * options.peers)]
    more = [] if options.memory_gib is None else ["--memory-gib", str(options.memory_gib)]
    return watched(manifest, root, stages, steps=options.steps, seconds=options.seconds, more=more)


def watched(
    manifest: Path, root: Path, stages: Sequence[int], *, steps: int, seconds: float, more: Sequence[str] = ()
) -> Measured:
    """A host and a peer of each of the stages, watched until so many steps are done, each within so many seconds of the
    one before; `more` options to join with."""
    swarm = [sys.executable, "-m", "swarm"]
    host = [*swarm, "host", str(manifest), "--listen", "127.0.0.1:0", "--json", "--ends-with-run"]
    host += ["--evaluate-tokens", "4096"]
    with contextlib.ExitStack() as stack:
        hosting = stack.enter_context(running(host, root / "host.log", stdout=-1))
        events = Events(hosting)
        invite = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["invite"]
        peers, programs = list[Watched](), list[Program]()
        for number, stage in enumerate(stages):
            folder = root / f"peer-{number}"
            join = [*swarm, "join", invite, "--yes", "--verbose", "--dir", str(folder), "--listen", "127.0.0.1:0"]
            join += ["--stage", str(stage), "--threads", "1", "--nice", "0", *more]
            log = root / f"peer-{number}.log"
            process = stack.enter_context(running(join, log))
            programs.append(Program(f"peer {number}", process, log))
            peers.append(Watched(folder, stage, psutil.Process(process.pid)))
        host_program = Watched(root, -1, psutil.Process(hosting.pid))
        version, since = -1, time.monotonic()
        while version < steps:
            if (newest := max(event.get("version", -1) for event in events.seen)) > version:
                version, since = newest, time.monotonic()
            if time.monotonic() > since + seconds:
                raise SystemExit(f"version {version + 1} of {steps} not within {seconds:g} s: {events.seen[-1:]}")
            for program in programs:
                program.check()
            for one in (*peers, host_program):
                one.look()
            time.sleep(LOOK_EVERY_S)
        for peer in peers:
            peer.process.send_signal(signal.SIGINT)
        return Measured(peers, host_program.all_bytes)


def figures(name: str, peer: Watched, num_parameters: int) -> dict[str, Any]:
    """Of one peer of a row."""
    reckoned, items = peer.reckoned()
    beside = peer.beside_the_stage_bytes
    return {
        "row": name,
        "stage": peer.stage,
        "parameters": num_parameters,
        "reckoned_bytes": reckoned,
        "held_bytes": peer.all_bytes,
        "held_share": peer.all_bytes / reckoned,
        "stage_reckoned_bytes_a_parameter": (reckoned - beside) / num_parameters,
        "stage_held_bytes_a_parameter": (peer.all_bytes - beside) / num_parameters,
        "own_bytes": peer.own_bytes,
        "p2pd_bytes": peer.p2pd_bytes,
        "mapped_bytes": peer.mapped_bytes,
        "items": items,
    }


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says; `arguments` in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", action="append", choices=sorted(ROWS), help="all of them unless named")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--peers", type=int, default=PEERS, help="of each stage")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--target-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300.0, help="that a step may take")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--smoke", action="store_true", help="a small model, two steps: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.hidden_size, options.layers, options.steps = 128, 2, 2
        options.row = options.row or ["full"]
    options.row = options.row or list(ROWS)
    return options


def line_of(one: dict[str, Any]) -> str:
    """For people."""
    reckoned, held = one["reckoned_bytes"] / GIB, one["held_bytes"] / GIB
    stage = one["stage_reckoned_bytes_a_parameter"], one["stage_held_bytes_a_parameter"]
    of_stage = "beside libraries and p2pd {:.1f} and {:.1f} bytes a parameter".format(*stage)
    what = f"{one['row']}, stage {one['stage']} of {one['parameters'] / 1e6:.0f} M parameters"
    return f"{what}: {reckoned:.2f} GiB reckoned, {held:.2f} held at most ({one['held_share']:.3f}); {of_stage}"


def main() -> None:
    options = options_of()
    found, hosts = list[dict[str, Any]](), dict[str, dict[str, int]]()
    for name in options.row:
        with tempfile.TemporaryDirectory() as folder:
            root, row = Path(folder), ROWS[name]
            measured = measure(options, root, row)
            counts = stage_num_parameters(read_manifest(root / "run.toml").model)
            meant = [peer for peer in measured.peers if row.only in (None, peer.stage)]
            rows = [figures(name, peer, counts[peer.stage]) for peer in meant]
            hosts[name] = {"parameters": sum(counts), "held_bytes": measured.host_bytes}
        found += rows
        if not options.json:
            print("\n".join(map(line_of, rows)))
            print(f"{name}, the host of {sum(counts) / 1e6:.0f} M parameters: {measured.host_bytes / GIB:.2f} GiB")
    over = [one for one in found if not 2 - BAR <= one["held_share"] <= BAR]
    if options.json:
        print(json.dumps({"bar": BAR, "rows": found, "hosts": hosts, "holds": not over}, indent=1))
    raise SystemExit(f"{len(over)} of {len(found)} peers are not within 15 % of what they reckoned" if over else 0)


if __name__ == "__main__":
    main()
