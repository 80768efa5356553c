"""Many simulated volunteers poll one host over its gRPC service, TLS and all.

    python -m benchmarks.churn.coordinator_load [--json] [--volunteers 200] [--seconds 30] ...

The host is a process of its own, as `swarm host` has it, but for the rate limit: all volunteers come from one address
here. Its ledger holds a run of some steps already, to which all of them were admitted. Each volunteer has a connection
of its own and asks once a second for the status or the peers of a stage, in turn. Measured is the time from a call to
its answer at the volunteer. The goals: a median under 20 ms, and no errors.
"""

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import grpc.aio
import psutil

from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import prepare_run
from swarm.core.canonical import Value
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis
from swarm.identity.key import Identity
from swarm.invite import Invite, parse_invite
from swarm.manifest.file import parse_manifest
from swarm.network.services.certificate import SERVER_NAME
from swarm.proto import coordinator_pb2 as pb
from swarm.proto import coordinator_pb2_grpc as rpc

MEDIAN_GOAL_S = 0.020
POLL_S = 1.0
READY_S = 120.0
CALL_S = 10.0
MANIFEST = '[run]\nname = "load"\n[data]\nmax_text_mb = 1\n[optimizer]\ntotal_steps = 1000000\n'


@dataclass
class Measured:
    """What the volunteers saw."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each method's calls."""
    errors: list[str] = field(default_factory=list)


def write_past(folder: Path, num_steps: int, peers: list[PeerId]) -> None:
    """A run in `folder` in which so many steps were made by these volunteers."""
    run = prepare_run(parse_manifest(MANIFEST, folder / "run.toml"), folder / "run", lambda what: None)
    ledger = Ledger(run.folder.ledger)
    with ledger.together():
        for stage in range(2):
            genesis = Genesis(
                run.run_id,
                StageIndex(stage),
                Version(0),
                bytes(32),
                tuple(sorted(peers[:2])),
                LeaseTable(),
                run.host_key.peer_id,
                run.run_key.peer_id,
                (),
                bytes(32),
                signature=bytes(64),
            )
            ledger.append("genesis", genesis.to_value())
        for number, peer in enumerate(peers):
            ledger.append("admitted", {"peer": peer, "stage": number % 2, "voucher": None})
        for step in range(num_steps):
            for stage in range(2):
                members = peers[stage::2]
                turn = step % len(members)
                credit: list[Value] = [[peer, 1, 1024] for peer in sorted((members[turn:] + members[:turn])[:64])]
                facts: dict[str, Value] = {"stage": stage, "step": step, "name": bytes(32), "ids": [], "credit": credit}
                ledger.append("result", {**facts, "members": len(credit), "joins": [], "leaves": [], "norm": 1.0})
    ledger.close()


@contextmanager
def host_of(folder: Path, num_steps: int, num_volunteers: int) -> Iterator[tuple[psutil.Process, Invite]]:
    """The host's process, and the invite to it. Forked: all that it needs is imported already."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(folder, num_steps, num_volunteers, theirs))
    process.start()
    theirs.close()  # where it ends too early, there is nothing to wait for
    try:
        yield psutil.Process(process.pid), parse_invite(ours.recv())
    finally:
        process.terminate()
        process.join(30)


def serve(folder: Path, num_steps: int, num_volunteers: int, pipe: Connection) -> None:
    """What `swarm host` does, with another rate limit."""
    from bootstrap.directory.doors import DoorSettings
    from bootstrap.program.held_run import HeldRun
    from bootstrap.program.host import HostSettings
    from bootstrap.program.hosting import Hosting, HostingSettings
    from swarm.network.loop import run
    from swarm.network.services.coordinator_service import ServiceLimits

    volunteers = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(num_volunteers)]
    write_past(folder, num_steps, [identity.peer_id for identity in volunteers])
    prepared = prepare_run(parse_manifest(MANIFEST, folder / "run.toml"), folder / "run", lambda what: None)
    doors = DoorSettings(limits=ServiceLimits(calls_per_s=1e6, burst=1e6))

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            pipe.send(event["invite"])

    settings = HostingSettings(listen=("/ip4/127.0.0.1/tcp/0",), host=HostSettings(), doors=doors)
    with HeldRun(prepared.folder.root) as held:
        run(lambda stop: Hosting(settings, held, show).run(prepared, stop))


async def volunteer(invite: Invite, pem: bytes, until: float, seed: int, found: Measured) -> None:
    """Poll until the time is over."""
    rng = random.Random(seed)
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(invite.target, grpc.ssl_channel_credentials(pem), options) as channel:
        stub = rpc.CoordinatorStub(channel)
        await asyncio.sleep(rng.uniform(0, POLL_S))
        await asyncio.wait_for(channel.channel_ready(), READY_S)
        calls = [
            ("GetStatus", lambda: stub.GetStatus(pb.StatusRequest(), timeout=CALL_S)),
            ("ListPeers", lambda: stub.ListPeers(pb.PeersRequest(stage=seed % 2), timeout=CALL_S)),
        ]
        turn = seed
        while time.monotonic() < until:
            await asyncio.sleep(POLL_S * rng.uniform(0.8, 1.2))
            name, call = calls[turn % len(calls)]
            await timed(name, call(), found)
            turn += 1


async def timed(name: str, call: Any, found: Measured) -> None:
    began = time.perf_counter()
    try:
        await call
    except grpc.aio.AioRpcError as error:
        found.errors.append(f"{name}: {error.code().name} {error.details()}")
        return
    found.seconds[name].append(time.perf_counter() - began)


async def poll(num_volunteers: int, invite: Invite, pem: bytes, seconds: float) -> Measured:
    found = Measured()
    until = time.monotonic() + seconds
    await asyncio.gather(*(volunteer(invite, pem, until, number, found) for number in range(num_volunteers)))
    return found


@click.command()
@click.option("--volunteers", "num_volunteers", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1), default=30.0, show_default=True)
@click.option("--steps", "num_steps", type=click.IntRange(min=1), default=2000, show_default=True, help="Of the past.")
@click.option("--smoke", is_flag=True, help="A few volunteers for a second: does it run?")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def main(num_volunteers: int, seconds: float, num_steps: int, smoke: bool, as_json: bool) -> None:
    """Poll a host as many volunteers do, and say how long its answers take."""
    if smoke:
        num_volunteers, seconds, num_steps = 4, 1.0, 20
    with (
        tempfile.TemporaryDirectory() as folder,
        host_of(Path(folder), num_steps, num_volunteers) as (process, invite),
    ):
        pem = (Path(folder) / "run" / "service.pem").read_bytes()
        pem = pem[pem.index(b"-----BEGIN CERTIFICATE") :]
        busy = process.cpu_times()
        found = asyncio.run(poll(num_volunteers, invite, pem, seconds))
        spent = process.cpu_times()
        size_bytes = process.memory_info().rss
    every = sorted(second for seconds_of in found.seconds.values() for second in seconds_of)
    result = {
        "volunteers": num_volunteers,
        "steps": num_steps,
        "calls": len(every),
        "errors": len(found.errors),
        "median_ms": 1e3 * statistics.median(every),
        "p99_ms": 1e3 * every[int(0.99 * len(every))],
        "methods_median_ms": {name: 1e3 * statistics.median(of) for name, of in sorted(found.seconds.items())},
        "host_cpu_s": spent.user + spent.system - busy.user - busy.system,
        "host_rss_mb": size_bytes / 1e6,
        "load": os.getloadavg()[0],
        "passed": not found.errors and statistics.median(every) < MEDIAN_GOAL_S,
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        for name, value in result.items():
            click.echo(f"{name:20} {value}")
        for error in found.errors[:5]:
            click.echo(error)


if __name__ == "__main__":
    main()
