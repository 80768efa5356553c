"""Evidence of any size comes to the host in pieces: whole, within bounds, and whatever gets lost on the way."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

import bootstrap.audit.accusations
import peer.audit.accuser
from bootstrap.audit.accusations import IDLE_S, LEFT_FREE_BYTES, MAX_COMING, MAX_OF_STRANGERS, IncomingEvidence, Taken
from peer.audit.accuser import MAX_TRIES, Accuser
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, Version
from swarm.host_protocol import ACCUSE, AccusationPiece
from swarm.manifest.signed_run import SignedRun
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import small_settings
from verification.audit.evidence import Evidence, Kind, head_end
from verification.replay.evidence_file import largest_evidence_bytes

PIECE = 1000
ACCUSED = PeerId("accused")
SENDERS = [PeerId(f"sender-{number:02}") for number in range(MAX_COMING + 1)]
BODY = random.Random(0).randbytes(3 * PIECE + 500)
LARGEST = len(BODY)


def incoming_in(folder: Path, largest_bytes: int) -> IncomingEvidence:
    """Of a host that fetches nothing itself."""
    return IncomingEvidence(folder, largest_bytes, cast(Any, None), lambda head, start: None, lambda stage: Version(0))


def piece(at: int, *, size: int = len(BODY), digest: int = 0) -> AccusationPiece:
    return AccusationPiece(ACCUSED, bytes([digest]) * 32, size, at)


@dataclass(frozen=True)
class Case:
    """Evidence of many blobs, some of them empty."""

    kind: Kind = "replay_mismatch"
    sizes: tuple[int, ...] = (1, 0, 2 * PIECE, 17, 0, PIECE, 3)
    accused: ClassVar[PeerId] = ACCUSED

    def to_evidence(self, run: SignedRun) -> Evidence:
        blobs = tuple(random.Random(size).randbytes(size) for size in self.sizes)
        return Evidence(
            kind=self.kind, accused=ACCUSED, stage=cast(Any, 0), version=cast(Any, 3), run=run, facts={}, blobs=blobs
        )


RUN = SignedRun(b"settings", PeerId("key"), signature=bytes(64))


def brought(
    folder: Path, lose: Callable[[int, IncomingEvidence], IncomingEvidence], *, case: Case = Case()
) -> tuple[list[bytes], list[int]]:
    """What comes of an accusation whose calls meet `lose`, before each of them; and where its pieces began."""

    async def main() -> tuple[list[bytes], list[int]]:
        network = MemoryNetwork(random.Random(0))
        host, accuser = (network.transport(identity_of(number)) for number in range(2))
        whole, asked, state = list[bytes](), list[int](), [incoming_in(folder, 1 << 20)]

        async def on_accuse(sender: PeerId, request: Message) -> Message:
            said = AccusationPiece.from_value(request.meta)
            asked.append(said.at)
            state[0] = lose(len(asked), state[0])
            taken = await state[0].take(sender, said, request.body, is_member=False)
            if taken.path is not None:
                whole.append(taken.path.read_bytes())
            return Message({"next": taken.next, "again_s": taken.again_s})

        host.serve(ACCUSE, on_accuse, max_body_bytes=PIECE)
        await Accuser(accuser, host.peer_id, RUN).accuse(case)
        return whole, asked

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.audit.accuser, "MAX_ACCUSATION_PIECE_BYTES", PIECE)
    monkeypatch.setattr(peer.audit.accuser, "AGAIN_S", 0.0)


def test_evidence_comes_whole_also_through_a_host_that_is_not_there_and_one_that_forgets(tmp_path: Path) -> None:
    wanted = Case().to_evidence(RUN).to_bytes()
    end = head_end(wanted)
    assert end is not None
    assert end <= PIECE
    starts = [0, *range(end, len(wanted), PIECE)]  # the head goes by itself
    whole, asked = brought(tmp_path / "a", lambda number, incoming: incoming)
    assert (whole, asked) == ([wanted], starts)

    def away(number: int, incoming: IncomingEvidence) -> IncomingEvidence:
        if number in (2, 3):
            raise TransientError("not now")
        return incoming

    whole, asked = brought(tmp_path / "b", away)
    assert (whole, asked) == ([wanted], [0, end, end, *starts[1:]])

    def started_again(number: int, incoming: IncomingEvidence) -> IncomingEvidence:
        return incoming_in(tmp_path / "c", 1 << 20) if number == 3 else incoming

    whole, asked = brought(tmp_path / "c", started_again)
    assert (whole, asked) == ([wanted], [0, end, end + PIECE, *starts])

    def never(number: int, incoming: IncomingEvidence) -> IncomingEvidence:
        raise TransientError("not now")

    with pytest.raises(TransientError, match="not now"):
        brought(tmp_path / "d", never)

    calls = []

    def forgetful(number: int, incoming: IncomingEvidence) -> IncomingEvidence:
        calls.append(number)
        return incoming_in(tmp_path / "e", 1 << 20) if number % 3 == 0 else incoming

    with pytest.raises(TransientError, match="takes no more"):
        brought(tmp_path / "e", forgetful)
    assert len(calls) <= 3 * MAX_TRIES


def test_what_can_be_no_piece_is_refused_and_one_that_came_before_is_told_where_to_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        incoming = incoming_in(tmp_path / "coming", LARGEST)
        for said, body in (
            (piece(0, size=LARGEST + 1), BODY[:PIECE]),
            (piece(0, size=1 << 62), BODY[:PIECE]),
            (piece(0), b""),
            (piece(0), BODY + b"x"),
            (piece(LARGEST - 1), b"xx"),
        ):
            with pytest.raises(RemoteError):
                await incoming.take(SENDERS[0], said, body, is_member=True)
        assert not (tmp_path / "coming").exists()
        assert await incoming.take(SENDERS[0], piece(PIECE), BODY[PIECE:], is_member=True) == Taken(0)
        both = await asyncio.gather(
            *(incoming.take(SENDERS[0], piece(0), BODY[:PIECE], is_member=True) for _ in range(2))
        )
        assert both == [Taken(PIECE)] * 2
        assert await incoming.take(SENDERS[0], piece(2 * PIECE), BODY[2 * PIECE :], is_member=True) == Taken(PIECE)
        assert await incoming.take(SENDERS[0], piece(0), BODY[:PIECE], is_member=True) == Taken(PIECE)
        assert await incoming.take(SENDERS[1], piece(PIECE), BODY[PIECE:], is_member=True) == Taken(
            0
        )  # another's is another's
        at, path, _ = await incoming.take(SENDERS[0], piece(PIECE), BODY[PIECE:], is_member=True)
        assert path is not None
        assert (at, path.read_bytes()) == (LARGEST, BODY)

    asyncio.run(main())


def test_of_an_accuser_one_file_is_under_way_and_who_stops_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(bootstrap.audit.accusations.time, "monotonic", lambda: now[0])

    async def main() -> None:
        folder = tmp_path / "coming"
        incoming = incoming_in(folder, LARGEST)
        for digest in (1, 2):
            assert await incoming.take(SENDERS[0], piece(0, digest=digest), BODY[:PIECE], is_member=True) == Taken(
                PIECE
            )
        assert len(list(folder.iterdir())) == 1
        for number, sender in enumerate(SENDERS[1:MAX_COMING]):
            now[0] += number
            assert await incoming.take(sender, piece(0), BODY[:PIECE], is_member=True) == Taken(PIECE)
        with pytest.raises(TransientError, match="8 accusations"):
            await incoming.take(SENDERS[-1], piece(0), BODY[:PIECE], is_member=True)
        now[0] = 100.0 + bootstrap.audit.accusations.IDLE_S
        assert await incoming.take(SENDERS[-1], piece(0), BODY[:PIECE], is_member=True) == Taken(PIECE)
        assert await incoming.take(SENDERS[0], piece(PIECE, digest=2), BODY[PIECE:], is_member=True) == Taken(0)
        assert len(list(folder.iterdir())) == MAX_COMING
        monkeypatch.setattr(bootstrap.audit.accusations, "LEFT_FREE_BYTES", 1 << 60)
        with pytest.raises(TransientError, match="no room on disk"):
            await incoming.take(SENDERS[1], piece(0, digest=3), BODY[:PIECE], is_member=True)
        assert len(list(folder.iterdir())) == MAX_COMING - 1  # it brings another now

    asyncio.run(main())


def test_what_comes_at_once_disturbs_nothing_that_comes_in_pieces(tmp_path: Path) -> None:
    """Whoever signs two things makes its accuser bring both; what that was bringing before goes on."""
    small = Case("equivocation", (3,))
    whole, asked = brought(tmp_path / "small", lambda number, incoming: incoming, case=small)
    assert (whole, asked) == ([small.to_evidence(RUN).to_bytes()], [0])

    async def main() -> None:
        incoming = incoming_in(tmp_path / "coming", LARGEST)
        assert await incoming.take(SENDERS[0], piece(0), BODY[:PIECE], is_member=True) == Taken(PIECE)
        for _ in range(2):
            other = piece(0, size=PIECE, digest=1)
            at, path, _ = await incoming.take(SENDERS[0], other, BODY[-PIECE:], is_member=True)
            assert path is not None
            assert (at, path.read_bytes()) == (PIECE, BODY[-PIECE:])
        at, path, _ = await incoming.take(SENDERS[0], piece(PIECE), BODY[PIECE:], is_member=True)
        assert path is not None
        assert (at, path.read_bytes()) == (LARGEST, BODY)

    asyncio.run(main())


def test_evidence_may_be_as_large_as_the_run_makes_it() -> None:
    small = largest_evidence_bytes(small_settings())
    assert 64 << 20 < small < 128 << 20


def test_keys_that_let_evidence_drip_keep_no_member_from_bringing_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of them held all places with a byte in two minutes each, or all of the disk by what they said was to come;
    and a member that has charged, and cannot bring its case, is struck."""
    free = 1 << 32
    monkeypatch.setattr(bootstrap.audit.accusations.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    async def main() -> None:
        incoming, huge = incoming_in(tmp_path / "coming", free), piece(0, size=(free - LEFT_FREE_BYTES) // 2)
        for sender in SENDERS[:MAX_OF_STRANGERS]:
            await incoming.take(sender, huge, b"x", is_member=False)
        with pytest.raises(TransientError, match="are being brought already"):
            await incoming.take(SENDERS[MAX_OF_STRANGERS], piece(0), BODY[:PIECE], is_member=False)
        large = await incoming.take(SENDERS[-1], piece(0, size=free // 3), BODY[:PIECE], is_member=True)
        assert large == Taken(PIECE)

    asyncio.run(main())


def test_who_brings_a_byte_now_and_then_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(bootstrap.audit.accusations.time, "monotonic", lambda: now[0])

    async def main() -> None:
        incoming = incoming_in(tmp_path / "coming", LARGEST)
        for at in range(2):
            for sender in SENDERS[:MAX_COMING]:
                assert await incoming.take(sender, piece(at), b"x", is_member=True) == Taken(at + 1)
            with pytest.raises(TransientError, match="8 accusations"):
                await incoming.take(SENDERS[-1], piece(0), BODY[:PIECE], is_member=True)
            now[0] += IDLE_S - 1.0  # none is idle, and each is far slower than any line
        assert await incoming.take(SENDERS[-1], piece(0), BODY[:PIECE], is_member=True) == Taken(PIECE)

    asyncio.run(main())
