"""Connections to a host's doors on which nothing is said: one address cannot hold all of them, nor all of its files."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from swarm.core.errors import SettingsError
from swarm.network.services import front, web_site
from swarm.network.services.coordinator_client import coordinator_client
from swarm.network.services.front import Passage
from swarm.network.services.web_client import WebClient
from tests.bootstrap.state.hosted import hosted

MOST, SILENT = 8, 40
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not list a process' files")


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def silent(port: int) -> list[socket.socket]:
    return [await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 30.0) for _ in range(SILENT)]


def test_silent_connections_of_one_address_take_few_files_and_shut_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's server and gRPC's take whoever connects: 300 had them hold 300 files, the latter's for two minutes."""
    monkeypatch.setattr(front, "MOST_CONNECTIONS", MOST)
    monkeypatch.setattr(web_site, "MOST_CONNECTIONS", MOST)

    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            assert host.doors.web is not None
            page = int(host.doors.web.rstrip("/").rpartition(":")[2])
            for port in (page, host.doors.invite.port):
                before, held = num_files(), await silent(port)
                for _ in range(600):
                    if num_files() - before - SILENT <= 3 * MOST:  # the passage has two files for each, and gRPC one
                        break
                    await asyncio.sleep(0.1)
                else:
                    raise AssertionError(f"{num_files() - before - SILENT} files for {SILENT} silent connections")

                def look() -> str:
                    with coordinator_client(host.doors.invite) as client:
                        return client.status().run_id

                assert await asyncio.to_thread(look) == host.run.run_id
                async with WebClient(host.doors.web) as client:
                    assert host.run.run_id.encode() in await client.read("/state.json", max_bytes=1 << 20)
                for one in held:
                    one.close()
                await asyncio.sleep(0.2)

    asyncio.run(scenario())


def test_what_is_handed_on_is_known_by_whose_it_is() -> None:
    async def scenario() -> None:
        passage, came = Passage(), asyncio.Queue[str]()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = await reader.readexactly(3)  # nothing is handed on before it is known whose it is
            came.put_nowait(passage.host_of(writer.get_extra_info("peername")[1]))
            writer.write(said)
            writer.close()

        behind = await asyncio.start_server(answer, "127.0.0.1", 0)
        led = await passage.lead("127.0.0.1:0", "service", to=front.port_of(behind))
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port_of(led), local_addr=("127.0.0.2", 0))
        writer.write(b"abc")
        assert await reader.read() == b"abc"
        assert await came.get() == "127.0.0.2"
        writer.close()
        with pytest.raises(SettingsError, match=rf"--service 127\.0\.0\.1:{front.port_of(led)}: cannot listen there"):
            await passage.lead(f"127.0.0.1:{front.port_of(led)}", "service", to=1)
        led.close()
        behind.close()

    asyncio.run(scenario())
