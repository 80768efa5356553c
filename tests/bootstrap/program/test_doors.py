"""What a host puts into its invite: addresses that answer, or that its owner vouches for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bootstrap.directory.doors import Doors, DoorSettings, seed_addresses
from bootstrap.program.command import beside
from swarm.core.errors import SettingsError
from swarm.network.directory.reachable import answering, host_and_port
from tests.bootstrap.state.hosted import Listening, hosted

DEAD = "/ip4/127.0.0.1/tcp/1"


@asynccontextmanager
async def listening() -> AsyncIterator[str]:
    """A port of this machine that takes connections."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    try:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def test_addresses_that_do_not_answer_are_left_out() -> None:
    async def look() -> None:
        async with listening() as alive:
            assert await answering([DEAD, alive, "/dns/no-such-name.invalid/tcp/1"]) == [alive]
            assert await seed_addresses([DEAD, alive], None, lambda event: None) == [alive]
        with pytest.raises(SettingsError, match="give --listen an address of this machine"):
            await seed_addresses([DEAD], None, lambda event: None)

    asyncio.run(look())


def test_public_name_comes_first_and_is_said_when_it_does_not_answer() -> None:
    async def look() -> None:
        said: list[dict[str, Any]] = []
        async with listening() as alive:
            port = host_and_port(alive)[1]
            chosen = await seed_addresses([f"{alive}/p2p/me"], "no-such-name.invalid", said.append)
            named = f"/dns/no-such-name.invalid/tcp/{port}/p2p/me"
            assert chosen == [named, f"{alive}/p2p/me"]
            assert said == [{"event": "unverified", "address": named}]
            said.clear()
            assert await seed_addresses([alive], "127.0.0.1", said.append) == [alive]
            assert said == []
            six = alive.replace("/ip4/127.0.0.1/", "/ip6/::1/").replace(str(port), "2")
            assert (await seed_addresses([six, alive], "127.0.0.1", said.append)) == [alive], "IPv6 has its own port"
            assert (await seed_addresses([alive], "2001:db8::1", said.append))[0] == f"/ip6/2001:db8::1/tcp/{port}"

    asyncio.run(look())


def test_doors_that_are_taken_are_named(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            port = host.doors.invite.port
            for settings, option in (
                (DoorSettings(service=f"127.0.0.1:{port}"), "--service"),
                (DoorSettings(web=f"127.0.0.1:{port}"), "--web"),
            ):
                with pytest.raises(SettingsError, match=f"{option} 127.0.0.1:{port}: cannot listen there"):
                    await Doors.open(host.itself, host.network.transport(host.run.run_key), settings, print)

    asyncio.run(look())


def test_doors_without_a_host_are_open_to_both_versions_of_ip(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            settings = DoorSettings(service=":0", web=":0")
            inner = host.network.transport(host.run.host_key)
            listening: Any = Listening(inner, host.doors.invite.addresses[0].partition("/p2p/")[0])
            doors = await Doors.open(host.itself, listening, settings, print)
            try:
                assert doors.settings.web is not None
                ports = [listen.rpartition(":")[2] for listen in (doors.settings.service, doors.settings.web)]
                listened = [f"/{kind}/tcp/{port}" for kind in ("ip4/127.0.0.1", "ip6/::1") for port in ports]
                assert set(await answering(listened)) == set(listened)
            finally:
                await doors.close()

    asyncio.run(look())


def test_ports_lie_beside_the_one_that_was_chosen() -> None:
    assert beside("0.0.0.0:4001", 1) == "0.0.0.0:4002"
    assert beside("[::]:4001", 2) == "[::]:4003"
    assert beside("127.0.0.1:0", 1) == "127.0.0.1:0"
    assert beside(":4001", 3) == ":4004"
