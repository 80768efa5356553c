"""A host that is started again is where its peers look for it."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from bootstrap.directory.doors import DoorSettings
from bootstrap.program import last_ports
from bootstrap.program.held_run import HeldRun
from bootstrap.program.host import HostSettings
from bootstrap.program.hosting import Hosting, HostingSettings
from bootstrap.program.last_ports import PORTS, LastPorts
from tests.ports import own_port
from tests.swarm_in_process import manifest_of, prepare


def test_a_port_is_taken_again_when_nothing_else_listens_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_ports, "FREED_WITHIN_S", 0.2)
    port = own_port()
    with socket.create_server(("127.0.0.1", port)):
        LastPorts(tmp_path).note({"web": port})
        assert asyncio.run(LastPorts(tmp_path).free("web", "127.0.0.1")) == 0
    assert asyncio.run(LastPorts(tmp_path).free("web", "127.0.0.1")) == port
    assert asyncio.run(LastPorts(tmp_path).free("service", "127.0.0.1")) == 0, "it had none"


@pytest.mark.parametrize("held", ["", "[]", '{"web": "none"}', '{"web": 70000}'])
def test_a_note_that_names_no_port_is_as_none(tmp_path: Path, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_ports, "FREED_WITHIN_S", 0.1)
    (tmp_path / PORTS).write_text(held)
    assert asyncio.run(LastPorts(tmp_path).free("web", "127.0.0.1")) == 0


@pytest.mark.processes
def test_a_host_that_may_have_any_port_has_the_same_invite_when_it_is_started_again(tmp_path: Path) -> None:
    async def hosted() -> tuple[str, str]:
        shown: list[dict[str, Any]] = []
        stop = asyncio.Event()

        def show(event: dict[str, Any]) -> None:
            shown.append(event)
            if event["event"] == "listening":
                stop.set()

        settings = HostingSettings(
            listen=("/ip4/127.0.0.1/tcp/0",), host=HostSettings(), doors=DoorSettings(web="127.0.0.1:0")
        )
        run = prepare(manifest_of(), tmp_path)
        with HeldRun(run.folder.root) as held:
            await Hosting(settings, held, show).run(run, stop)
        (listening,) = (event for event in shown if event["event"] == "listening")
        return listening["invite"], listening["web"]

    assert asyncio.run(hosted()) == asyncio.run(hosted())
