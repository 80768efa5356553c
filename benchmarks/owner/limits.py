"""The owner's limits measured against the kernel's own counters: `python -m benchmarks.owner.limits`.

Megabits a second: a limited peer and another in network namespaces of their own; what its interface sent and received,
all headers included. Cores: processor seconds of a daemon's threads and child that would take every core. Needs root.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.homes.namespaces import Namespaces, enter

BODY_BYTES = 256 << 10
CALLS = 4
"""At a time."""
WARM_S = 2.0
MBIT = (4.0, 20.0)
SMOKE_S = 1.0
BAR = 1.05


def _peer(namespace: str, address: str, pipe: Connection, task: dict[str, Any] | None) -> None:
    """One peer in its namespace: without a task it echoes; with one it moves bytes and tells the rate."""
    enter(namespace)
    from peer.directory.limited_transport import LimitedTransport
    from peer.directory.line import Line
    from swarm.core.ids import PeerId
    from swarm.identity.key import Identity
    from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
    from swarm.network.transport import Message

    async def main() -> None:
        identity = Identity.generate()
        transport = await P2PTransport.create(identity, P2PSettings(listen=(f"/ip4/{address}/tcp/0",)))
        try:
            if task is None:

                async def take(sender: PeerId, request: Message) -> Message:
                    return Message()

                async def give(sender: PeerId, request: Message) -> Message:
                    return Message({}, bytes(BODY_BYTES))

                transport.serve("take", take, max_body_bytes=BODY_BYTES)
                transport.serve("give", give, max_body_bytes=0)
                pipe.send((identity.peer_id, transport.addresses()))
                await asyncio.to_thread(pipe.recv)
                return
            other, addresses = pipe.recv()
            await transport.connect(PeerId(other), addresses)
            limited = LimitedTransport(transport, Line(upload_mbit=task["up"], download_mbit=task["down"]))

            async def move() -> None:
                while True:
                    body = bytes(BODY_BYTES) if task["up"] is not None else b""
                    method = "take" if task["up"] is not None else "give"
                    await limited.call(
                        PeerId(other), method, Message({}, body), timeout_s=120.0, max_body_bytes=BODY_BYTES
                    )

            moving = [asyncio.ensure_future(move()) for _ in range(CALLS)]
            await asyncio.sleep(WARM_S)
            before, started = _on_line(), time.monotonic()
            await asyncio.sleep(task["seconds"])
            after, elapsed_s = _on_line(), time.monotonic() - started
            for one in moving:
                one.cancel()
            await asyncio.gather(*moving, return_exceptions=True)
            pipe.send([(end - start) * 8e-6 / elapsed_s for start, end in zip(before, after, strict=True)])
        finally:
            await transport.close()

    asyncio.run(main())


def _on_line() -> tuple[int, int]:
    """Bytes that eth0 of this namespace has sent and received."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            numbers = counts.split()
            return int(numbers[8]), int(numbers[0])
    raise AssertionError("no eth0 in this namespace")


def measure_mbit(up: float | None, down: float | None, seconds: float) -> list[float]:
    """Mbit/s that the limited peer's interface sent and received."""
    context = multiprocessing.get_context("spawn")
    with Namespaces(("limited", "other")) as network:
        ours, theirs = context.Pipe(), context.Pipe()
        task = {"up": up, "down": down, "seconds": seconds}
        processes = [
            context.Process(target=_peer, args=(network.namespace(name), network.address(name), pipe[1], work))
            for name, pipe, work in (("other", theirs, None), ("limited", ours, task))
        ]
        try:
            for process in processes:
                process.start()
            ours[0].send(theirs[0].recv())
            found: list[float] = ours[0].recv()
            theirs[0].send(None)
            for process in processes:
                process.join(20)
            return found
        finally:
            for process in processes:
                with contextlib.suppress(AttributeError):
                    process.kill()


def _burn(threads: int, seconds: float, pipe: Connection) -> None:
    from peer.machine.cores import claim_cores
    from swarm.local.compute_pools import bound_pools

    claim_cores(threads)
    bound_pools(threads)
    import torch

    child = multiprocessing.get_context("spawn").Process(target=_spin, args=(seconds + 2.0,))  # as p2pd would
    child.start()
    started, used = time.monotonic(), os.times()
    matrix = torch.randn(512, 512)
    while time.monotonic() - started < seconds:
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    elapsed_s = time.monotonic() - started
    now = os.times()
    import psutil

    child_times = psutil.Process(child.pid).cpu_times()
    own = now.user + now.system - used.user - used.system
    pipe.send((own + child_times.user + child_times.system) / elapsed_s)
    child.kill()
    child.join()


def _spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def measure_cores(threads: int, seconds: float) -> float:
    """Cores that a program limited to `threads` took, with a child that spins beside it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_burn, args=(threads, seconds, theirs))
    process.start()
    found: float = ours.recv()
    process.join(20)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--smoke", action="store_true", help="one limit for a second: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    seconds = SMOKE_S if options.smoke else options.seconds
    for mbit in MBIT[:1] if options.smoke else MBIT:
        rows.append(("upload-mbit", mbit, measure_mbit(mbit, None, seconds)[0]))
        if not options.smoke:
            rows.append(("download-mbit", mbit, measure_mbit(None, mbit, seconds)[1]))
    if not options.smoke:
        rows.append(("threads", 1.0, measure_cores(1, seconds / 2)))
    if options.json:
        print(json.dumps([{"limit": name, "allowed": allowed, "used": used} for name, allowed, used in rows], indent=1))
    else:
        for name, allowed, used in rows:
            print(f"{name:<14} {allowed:>6.1f} allowed, {used:6.2f} used: {used / allowed:.3f}")
    if options.smoke:
        return
    over = [name for name, allowed, used in rows if used > BAR * allowed]
    raise SystemExit(f"over their limit by more than 5 %: {over}" if over else 0)


if __name__ == "__main__":
    main()
