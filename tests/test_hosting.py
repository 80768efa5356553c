"""A host whose disk is full hears its owner, is gone for all others, and is back by itself where it was."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bootstrap.coordinator import CoordinatorSettings
from bootstrap.doors import DoorSettings
from bootstrap.hosting import Hosting, HostSettings
from bootstrap.ledger import Ledger
from swarm.admission_request import AdmissionRequest
from swarm.core.canonical import pack
from swarm.core.errors import TransientError
from swarm.core.ids import RunId
from swarm.invite import parse_invite
from swarm.network.addresses import port_of
from swarm.network.coordinator_client import coordinator_client
from tests.ports import own_port
from tests.small_disks import fill, small_disk, why_not
from tests.swarm_in_process import identity_of, manifest_of, prepare

pytestmark = pytest.mark.processes

SOON_S = 30.0


def admit(line: str, number: int) -> None:
    """Have the host write something down. Raises TransientError if it cannot."""
    invite, peer = parse_invite(line), identity_of(number)
    asked = AdmissionRequest(RunId(invite.run_id), peer.peer_id, 0, bytes(32), "", int(time.time() * 1000))
    with coordinator_client(invite) as client:
        client.admit(pack(asked.signed_by(peer).to_value()))


async def until(holds: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not {what} within {SOON_S:g} s"
        await asyncio.sleep(0.02)


def p2pd_at(address: str) -> psutil.Process:
    """The process that listens at a multiaddress."""
    port = port_of(address)
    for process in psutil.Process().children(recursive=True):
        if any(held.laddr and held.laddr.port == port for held in process.net_connections("tcp")):
            return process
    raise AssertionError(f"nothing listens at {address}")


def test_a_host_waits_for_room_with_its_ears_open_and_takes_the_run_up_where_it_was(tmp_path: Path) -> None:
    reason = why_not(tmp_path / "probe")
    if reason is not None:
        pytest.skip(reason)

    async def main(disk: Path) -> None:
        shown: list[dict[str, Any]] = []
        run = prepare(manifest_of(), tmp_path)
        port = own_port()
        settings = HostSettings(
            listen=f"/ip4/127.0.0.1/tcp/{port}",
            coordinator=CoordinatorSettings(),
            doors=DoorSettings(service=f"127.0.0.1:{port + 1}", web=f"127.0.0.1:{port + 2}"),
            report=disk / "report.json",
        )
        stop = asyncio.Event()
        hosting = asyncio.ensure_future(Hosting(settings, shown.append).run(run, stop))

        def said(event: str) -> list[dict[str, Any]]:
            assert not hosting.done(), hosting
            return [told for told in shown if told["event"] == event]

        await until(lambda: len(said("listening")) == 1, "listening")
        invite = said("listening")[0]["invite"]
        await asyncio.to_thread(admit, invite, 0)
        for times in (1, 2):
            ballast = fill(disk)
            with pytest.raises(TransientError):
                await asyncio.to_thread(admit, invite, times)
            await until(lambda times=times: len(said("disk_full")) == times, "said to be full")  # type: ignore[misc]
            assert "make room there" in said("disk_full")[-1]["reason"]
            if times == 1:
                ballast.unlink()
                await until(lambda: len(said("listening")) == 2, "listening again")
                assert said("listening")[0] == said("listening")[1]  # at the same addresses
                await asyncio.to_thread(admit, invite, 1)
                p2pd_at(said("listening")[0]["addresses"][0]).kill()
                await until(lambda: len(said("listening")) == 3, "listening after its p2pd was killed")
        began = time.monotonic()
        stop.set()
        async with asyncio.timeout(SOON_S):
            await hosting
        assert time.monotonic() - began < 3.0
        assert shown[-1] == {"event": "finished"}
        ballast.unlink()
        ledger = Ledger(disk / "ledger.sqlite")
        admitted: list[Any] = [event.facts for event in ledger.events("admitted")]
        ledger.close()
        assert [facts["peer"] for facts in admitted] == [identity_of(number).peer_id for number in (0, 1)]

    with small_disk(tmp_path / "host") as disk:
        asyncio.run(main(disk))
        assert not [path for path in disk.rglob("*") if path.name.endswith(".partial") or ".room" in path.name]
