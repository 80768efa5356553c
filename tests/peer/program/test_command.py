"""What a command line becomes before a daemon runs."""

import io
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from peer.program.command import _say, command, places
from swarm.identity.key import Identity

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("listen", "num_peers", "expected"),
    [
        (":4001", 1, [":4001"]),
        (":4001", 3, [":4001", ":4003", ":4004"]),
        ("[::]:0", 2, ["[::]:0", "[::]:0"]),
    ],
)
def test_each_peer_listens_at_a_port_of_its_own_beside_the_relays(
    listen: str, num_peers: int, expected: list[str]
) -> None:
    assert places(listen, num_peers) == expected


@pytest.mark.skipif(not FULL.exists(), reason="no such device here")
def test_a_full_disk_does_not_end_the_peer_that_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    with FULL.open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        _say("the host does not answer")


def test_what_happens_in_the_background_is_in_the_bounded_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr("peer.program.detached.start_detached", lambda state, arguments: started.extend(arguments))
    address = f"/ip4/192.0.2.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer_id}"
    arguments = [address, "--yes", "--detach", "--verbose", "--stage", "1", "--dir", str(tmp_path)]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert started == ["join", address, "--yes", "--listen", ":0", "--dir", str(tmp_path), "--stage", "1"]
