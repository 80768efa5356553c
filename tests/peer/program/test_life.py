"""A daemon tries for ever without pressing, ends when its run does, and remembers whom it met."""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.directory.known_peers import MOST_PEERS, KnownPeers
from peer.owner.consent import silent
from peer.owner.limits import VolunteerSettings
from peer.owner.tally import WorkTally
from peer.program.daemon import PeerDaemon
from peer.program.life import FIRST_RETRY_S, LONGEST_RETRY_S, Backoff, Life
from swarm.core.errors import NotFreeError
from swarm.core.ids import PeerId
from swarm.core.owner.guest import Conduct
from swarm.host_protocol import FINISH
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork
from swarm.network.service import Message
from tests.swarm_in_process import identity_of


def test_waits_double_up_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(random.Random(3))
    waits = [backoff.next_s() for _ in range(20)]
    assert waits[0] <= FIRST_RETRY_S
    assert all(LONGEST_RETRY_S / 2 <= wait <= LONGEST_RETRY_S for wait in waits[8:])
    assert len(set(waits[8:])) > 1
    backoff.reset()
    assert backoff.next_s() <= FIRST_RETRY_S


class LifeOnAFullMachine(Life):
    """Others let go of what it needs after two refusals; then its run is over."""

    refusals = 2

    async def _session(self, stop: asyncio.Event) -> bool:
        if not self.refusals:
            return True
        self.refusals -= 1
        raise NotFreeError("this stage needs 4.00 GiB of memory and free memory is 3.00 GiB")


@pytest.mark.parametrize("waits_for_room", [False, True])
def test_what_others_hold_is_waited_for_where_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for_room: bool
) -> None:
    """A machine that starts again with its owner's programs open is not lost to the run."""
    monkeypatch.setattr("peer.program.life.FIRST_RETRY_S", 0.01)
    said: list[str] = []
    desk: Any = SimpleNamespace(decision=SimpleNamespace(conduct=Conduct.WORK))
    peer: Any = SimpleNamespace(folder=tmp_path, phase="", waits_for="")
    life = LifeOnAFullMachine(
        *(desk, peer, identity_of(0).peer_id, (), KnownPeers(tmp_path / "known-peers.json")),
        on_run=silent,
        say=said.append,
        rng=random.Random(0),
        waits_for_room=waits_for_room,
    )
    if waits_for_room:
        asyncio.run(life.run(asyncio.Event()))
        assert "free memory is 3.00 GiB (tried again for ever" in said[0]
    else:
        with pytest.raises(NotFreeError):
            asyncio.run(life.run(asyncio.Event()))


def test_the_peers_met_last_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "known-peers.json"
    known = KnownPeers(path)
    met = [PeerId(Identity.generate().peer_id) for _ in range(MOST_PEERS + 3)]
    for peer in met:
        known.remember({peer: ["/ip4/192.0.2.1/tcp/4001"]})
    assert list(json.loads(path.read_text())) == met[3:]
    again = KnownPeers(path)
    again.remember({met[-1]: []})
    assert list(json.loads(path.read_text())) == met[3:]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": [1]}', "nonsense"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known-peers.json"
    path.write_text(text)
    known = KnownPeers(path)
    peer = PeerId(Identity.generate().peer_id)
    known.remember({peer: ["/ip4/192.0.2.1/tcp/4001"]})
    assert json.loads(path.read_text()) == {peer: ["/ip4/192.0.2.1/tcp/4001"]}


def test_a_tally_without_work_has_no_rank() -> None:
    tally = WorkTally(Identity.generate().peer_id)
    assert (tally.rank(), tally.since_last_s, tally.tokens_per_s) == ((0, 0), -1.0, 0.0)


def test_a_peer_that_is_still_joining_ends_with_its_run(tmp_path: Path) -> None:
    async def follow() -> None:
        network = MemoryNetwork(random.Random(3))
        host = network.transport(identity_of(0))  # it serves nothing (any more): nobody gets in
        identity = identity_of(77)
        transport, directory = network.transport(identity), network.directory(identity)
        volunteer = VolunteerSettings(folder=tmp_path, threads=1)
        daemon = PeerDaemon(volunteer, identity, transport, directory, identity_of(0).peer_id)
        running = asyncio.ensure_future(daemon.run(asyncio.Event()))
        done, _ = await asyncio.wait({running}, timeout=0.2)
        assert not done, "it tries on"
        await host.call(identity.peer_id, FINISH, Message(), timeout_s=5, max_body_bytes=0)
        async with asyncio.timeout(5):
            await running
        assert daemon.finished.is_set()
        for each in (directory, transport, host):
            await each.close()

    asyncio.run(follow())
