"""The memory of peers under load: `python -m benchmarks.owner.memory`.

A host and two peers of each of two stages; each peer may use just what it reckons, before it joins, that it needs at
most. Held against that: the most memory that the kernel counted for a daemon with its p2pd and its guard, shared pages
to each (RSS), looked at every tenth of a second.
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

import psutil

from benchmarks.training_throughput import READY_S, Events, running

GIB = 1 << 30
LOOK_EVERY_S = 0.1
BAR = 1.05
STAGES, PEERS = 2, 2

MANIFEST = """\
[run]
name = "memory"
trust = "{trust}"
[model]
preset = "{preset}"
stages = {stages}
[data]
max_text_mb = 4
[batch]
microbatch_size = {microbatch_size}
target_tokens = {target_tokens}
[optimizer]
total_steps = 100000
[codecs]
averaging = "{codec}"
[averaging]
delay = {delay}
sync_steps = 1
[audits]
agreements_to_promote = 0
[checkpoint]
every_steps = 8
snapshot_every = 8
[limits]
founders_per_stage = {peers}
"""


@dataclass
class Watched:
    """One peer and the most that it held."""

    folder: Path
    process: psutil.Process
    own_bytes: int = 0
    """Of the daemon alone."""
    p2pd_bytes: int = 0
    """Of all that it started."""
    all_bytes: int = 0

    def look(self) -> None:
        own = self.process.memory_info().rss
        started = 0
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                started += child.memory_info().rss
        self.own_bytes, self.p2pd_bytes = max(self.own_bytes, own), max(self.p2pd_bytes, started)
        self.all_bytes = max(self.all_bytes, own + started)

    def reckoned(self) -> tuple[int, str]:
        """Bytes that it said it needs at most, and its items."""
        said = re.search(r"at most ([\d.]+) GiB of memory: (.*)", (self.folder / "daemon.log").read_text())
        assert said is not None, f"{self.folder} reckoned nothing"
        return round(float(said[1]) * GIB), said[2]


def measure(options: argparse.Namespace, root: Path) -> list[Watched]:
    """Peers of a run that has trained for so many steps."""
    manifest = root / "run.toml"
    manifest.write_text(
        MANIFEST.format(
            trust=options.trust,
            preset=options.preset,
            stages=STAGES,
            peers=PEERS,
            microbatch_size=options.microbatch_size,
            target_tokens=options.target_tokens,
            codec=options.codec,
            delay=options.delay,
        )
    )
    swarm = [sys.executable, "-m", "swarm"]
    host = [
        *swarm,
        "host",
        str(manifest),
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--ends-with-run",
        "--evaluate-tokens",
        "4096",
    ]
    with contextlib.ExitStack() as stack:
        hosting = stack.enter_context(running(host, root / "host.log", stdout=-1))
        events = Events(hosting)
        invite = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["invite"]
        peers = []
        for number in range(STAGES * PEERS):
            folder = root / f"peer-{number}"
            join = [*swarm, "join", invite, "--yes", "--verbose", "--dir", str(folder), "--listen", "127.0.0.1:0"]
            join += ["--stage", str(number // PEERS), "--threads", "1"]
            if options.memory_gib is not None:
                join += ["--memory-gib", str(options.memory_gib)]
            program = stack.enter_context(running(join, root / f"peer-{number}.log"))
            peers.append(Watched(folder, psutil.Process(program.pid)))
        give_up_at = time.monotonic() + options.seconds
        while not any(event.get("version", -1) >= options.steps for event in events.seen):
            if time.monotonic() > give_up_at:
                raise SystemExit(f"no version {options.steps} within {options.seconds:g} s: {events.seen[-1:]}")
            for peer in peers:
                peer.look()
            time.sleep(LOOK_EVERY_S)
        for peer in peers:
            peer.process.send_signal(signal.SIGINT)
        return peers


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says; `arguments` in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--trust", default="friends", choices=("friends", "public"))
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--delay", type=int, default=1)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--target-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300.0, help="that the steps may take")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--smoke", action="store_true", help="a small model, two steps: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.preset, options.steps = "tiny", 2
    return options


def main() -> None:
    options = options_of()
    with tempfile.TemporaryDirectory() as folder:
        peers = measure(options, Path(folder))
        rows = [(peer.reckoned()[0], peer.own_bytes, peer.p2pd_bytes, peer.all_bytes) for peer in peers]
        if options.json:
            names = ("reckoned_bytes", "own_bytes", "p2pd_bytes", "all_bytes")
            print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))
        else:
            for number, (reckoned, own, started, both) in enumerate(rows):
                most = f"{own / GIB:.3f} in the daemon, {started / GIB:.3f} in p2pd and its guard"
                print(f"stage {number // PEERS}: {reckoned / GIB:.3f} GiB reckoned; at most {most}, ", end="")
                print(f"{both / GIB:.3f} at once: {both / reckoned:.3f}")
            print(peers[0].reckoned()[1])
        over = [reckoned for reckoned, _, _, both in rows if both > BAR * reckoned]
    raise SystemExit(f"{len(over)} of {len(rows)} peers held more than 1.05 of what they reckoned" if over else 0)


if __name__ == "__main__":
    main()
