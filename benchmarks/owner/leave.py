"""How long leaving takes: `python -m benchmarks.owner.leave`.

A host and two peers of each of two stages train the preset "small", and as many busy programs as asked for take the
cores from them. A peer of each stage in turn is told to leave, timed until its process is gone, and started again.
Last, one leaves while it is only joining and compiles its kernels.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.owner.memory import MANIFEST, PEERS, STAGES
from benchmarks.training_throughput import READY_S, Events, running

GOAL_S = 30.0
SWARM = [sys.executable, "-m", "swarm"]


def leave(program: "subprocess.Popen[str]", folder: Path) -> float:
    """Seconds from the command until the daemon's process has ended well."""
    began = time.monotonic()
    subprocess.run([*SWARM, "leave", "--dir", str(folder)], check=True, capture_output=True, timeout=60)
    assert program.wait(GOAL_S) == 0, f"{folder.name} ended with {program.returncode}"
    return time.monotonic() - began


def measure(times: int, busy: int, preset: str, root: Path) -> list[tuple[str, float]]:
    """What left, and how long it took."""
    manifest = root / "run.toml"
    fields = {"trust": "friends", "stages": STAGES, "peers": PEERS, "microbatch_size": 2, "optimizer": ""}
    model = f'preset = "{preset}"'
    manifest.write_text(MANIFEST.format(**fields, model=model, target_tokens=1024, codec="int8", delay=1))
    found: list[tuple[str, float]] = []
    with contextlib.ExitStack() as stack:
        host = [
            *SWARM,
            "host",
            str(manifest),
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--ends-with-run",
            "--evaluate-tokens",
            "1",
        ]
        events = Events(stack.enter_context(running(host, root / "host.log", stdout=subprocess.PIPE)))
        invite = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["invite"]

        def start(number: int, name: str = "peer", **environment: str) -> "subprocess.Popen[str]":
            join = [*SWARM, "join", invite, "--yes", "--threads", "1", "--listen", "127.0.0.1:0"]
            join += ["--dir", str(root / f"{name}-{number}"), "--stage", str(number // PEERS)]
            log = root / f"{name}-{number}.log"
            return stack.enter_context(running(join, log, env={**os.environ, **environment}))

        peers = [start(number) for number in range(STAGES * PEERS)]

        def later(count: int) -> None:
            before = len(events.seen)
            seen = [event for event in events.seen if event["event"] == "version"]
            wanted = (seen[-1]["version"] if seen else 0) + count
            events.wait_for(lambda event: event.get("version", -1) >= wanted, timeout_s=READY_S)
            assert len(events.seen) > before

        later(2)
        for _ in range(busy):
            stack.enter_context(running([sys.executable, "-c", "while True: pass"], root / "busy.log"))
        for turn in range(times):
            number = turn % 2 * PEERS
            later(1)
            took_s = leave(peers[number], root / f"peer-{number}")
            found.append((f"stage {number // PEERS}, {busy} busy", took_s))
            print(f"{found[-1][0]}: {took_s:.1f} s", file=sys.stderr, flush=True)
            peers[number] = start(number)
        cold = start(STAGES * PEERS - 1, "cold", NUMBA_CACHE_DIR=str(root / "empty"))
        log = root / f"cold-{STAGES * PEERS - 1}" / "daemon.log"
        give_up_at = time.monotonic() + READY_S
        while not (root / "empty").exists():  # its first kernel is compiled
            if time.monotonic() > give_up_at or cold.poll() is not None:
                raise SystemExit(f"it did not come to compile: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        found.append((f"joining, {busy} busy", leave(cold, log.parent)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--busy", type=int, default=0, help="programs that take all they get")
    parser.add_argument("--smoke", action="store_true", help="a small model, one turn: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    preset = "tiny" if options.smoke else "small"
    times = 1 if options.smoke else options.times
    with tempfile.TemporaryDirectory() as folder:
        found = measure(times, options.busy, preset, Path(folder))
    if options.json:
        print(json.dumps([{"what": what, "seconds": round(took_s, 2)} for what, took_s in found]))
    else:
        for what, took_s in found:
            print(f"{what}: left after {took_s:.1f} s")
    raise SystemExit(0 if all(took_s < GOAL_S for _, took_s in found) else 1)


if __name__ == "__main__":
    main()
