"""A host whose disk is full hears its owner, is gone for all others, and is back by itself where it was."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bootstrap.directory.doors import DoorSettings
from bootstrap.program.held_run import HeldRun, running_at
from bootstrap.program.host import HostSettings
from bootstrap.program.hosting import Hosting, HostingSettings
from bootstrap.program.ledger import Ledger
from swarm.core.errors import LocalError
from swarm.network.addresses import port_of
from swarm.network.services.host_client import host_client
from tests.peer.owner.small_disks import fill, small_disk, why_not
from tests.ports import own_port
from tests.swarm_in_process import manifest_of, prepare

pytestmark = pytest.mark.processes

SOON_S = 30.0


def give_away(folder: Path, number: int) -> None:
    """Have the host write something down. Raises LocalError if it cannot."""
    with host_client(running_at(folder)) as host:
        host.create_voucher(uses=1, days=1.0, note=str(number))


async def until(holds: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not {what} within {SOON_S:g} s"
        await asyncio.sleep(0.02)


def p2pd_at(address: str) -> psutil.Process:
    """The process that listens at a multiaddress."""
    port = port_of(address)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(held.laddr and held.laddr.port == port for held in process.net_connections("tcp")):
                return process
    raise AssertionError(f"nothing listens at {address}")


def test_a_host_waits_for_room_with_its_ears_open_and_takes_the_run_up_where_it_was(tmp_path: Path) -> None:
    reason = why_not(tmp_path / "probe")
    if reason is not None:
        pytest.skip(reason)

    async def main(disk: Path, held: HeldRun) -> None:
        shown: list[dict[str, Any]] = []
        run = prepare(manifest_of(), tmp_path)
        port = own_port()
        settings = HostingSettings(
            listen=(f"/ip4/127.0.0.1/tcp/{port}",),
            host=HostSettings(),
            doors=DoorSettings(service=f"127.0.0.1:{port + 1}", web=f"127.0.0.1:{port + 2}"),
            report=disk / "report.json",
        )
        stop = asyncio.Event()
        hosting = asyncio.ensure_future(Hosting(settings, held, shown.append).run(run, stop))

        def said(event: str) -> list[dict[str, Any]]:
            assert not hosting.done(), hosting
            return [told for told in shown if told["event"] == event]

        await until(lambda: len(said("listening")) == 1, "listening")
        await asyncio.to_thread(give_away, disk, 0)
        for times in (1, 2):
            ballast = fill(disk)
            with pytest.raises(LocalError, match=r"make room there|has ended"):
                await asyncio.to_thread(give_away, disk, times)
            await until(lambda times=times: len(said("disk_full")) == times, "said to be full")  # type: ignore[misc]
            assert "make room there" in said("disk_full")[-1]["reason"]
            if times == 1:
                ballast.unlink()
                await until(lambda: len(said("listening")) == 2, "listening again")
                assert said("listening")[0] == said("listening")[1]  # at the same addresses
                await asyncio.to_thread(give_away, disk, 1)
                p2pd_at(said("listening")[0]["addresses"][0]).kill()
                await until(lambda: len(said("listening")) == 3, "listening after its p2pd was killed")
        began = time.monotonic()
        stop.set()
        async with asyncio.timeout(SOON_S):
            await hosting
        assert time.monotonic() - began < 10.0
        assert shown[-1] == {"event": "finished"}
        ballast.unlink()
        ledger = Ledger(disk / "ledger.sqlite")
        given_away: list[Any] = [event.facts for event in ledger.events("voucher")]
        ledger.close()
        assert [facts["note"] for facts in given_away] == ["0", "1"]

    with small_disk(tmp_path / "host") as disk:
        with HeldRun(disk) as held:
            asyncio.run(main(disk, held))
        assert not [path for path in disk.rglob("*") if path.name.endswith(".partial") or ".room" in path.name]
