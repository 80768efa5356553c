"""The state and the results that evidence rests on come to the host from the stage's members, not from one home."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import bootstrap.audit.accusations
from bootstrap.audit.accusations import HELPED_EVERY
from bootstrap.round.followed_stage import FollowedStage
from peer.audit.accuser import Accuser
from swarm.checkpoint.state import CHUNK_BYTES
from swarm.checkpoint.transfer import CHUNK, PART_BYTES
from swarm.core.canonical import pack
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, Version
from swarm.core.state.stage_chain import StageChain
from swarm.host_protocol import AccusationPiece
from swarm.identity.key import Identity
from swarm.network.transport import Message
from tests.bootstrap.audit.test_justice import STAGE, Court, Past6, past, wrong_work  # noqa: F401
from tests.swarm.core.round.round_world import run_key
from verification.audit.evidence import MAGIC, Evidence, EvidenceHead, head_end
from verification.kinds.replay_mismatch import ReplayMismatch

STEP = 4
"""Of the deed: four results lie between it and the state."""


@pytest.fixture
def court(past: Past6, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Court:  # noqa: F811
    monkeypatch.setattr(bootstrap.audit.accusations, "COME_AGAIN_S", 0.01)
    return Court(past, tmp_path)


def begun(court: Court, *, is_anchored: bool = True) -> None:
    """The stage's founders are known, and where its past begins."""
    court.open()
    unsigned = court.past.genesis
    genesis = replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))
    court.ledger.append("genesis", genesis.to_value())
    if is_anchored:
        court.ledger.append("anchor", court.past.anchor.to_value())
    court.open()


class Line:
    """The accuser's: what it brings is counted."""

    def __init__(self, court: Court) -> None:
        self._court = court
        self.sent_bytes = 0
        self.accuser = Accuser(cast(Any, self), court.host.peer_id, court.past.signed)

    async def call(self, peer: PeerId, method: str, message: Message, **limits: Any) -> Message:
        self.sent_bytes += len(message.body)
        return await self._court.auditor.call(peer, method, message, **limits)


def serve(court: Court, member: Identity, given: list[str], *, spoil: Callable[[bytes], bytes]) -> None:
    """A member gives what it holds of the past, as `spoil` leaves it."""
    held, transport = court.past, court.network.transport(member)
    pairs = (pair for done in held.rounds for pair in zip(done.result.parts, done.bodies, strict=True))
    bodies = {bytes(part.digest): body for part, body in pairs}

    async def on_chunk(sender: PeerId, request: Message) -> Message:
        given.append(CHUNK)
        return Message({}, spoil(held.state[cast(int, request.meta["index"])]))

    async def on_part(sender: PeerId, request: Message) -> Message:
        given.append(PART_BYTES)
        return Message({}, spoil(bytes(bodies[cast(bytes, request.meta["digest"])])))

    for method, answer in ((CHUNK, on_chunk), (PART_BYTES, on_part)):
        transport.serve(method, answer, max_body_bytes=0)


def third(held: Past6) -> Identity:
    """The member that is neither accuser nor accused."""
    return next(one for one in held.members if one not in (held.auditor, held.target))


async def judged(court: Court, line: Line, case: ReplayMismatch) -> dict[str, Any]:
    """What the host says of the case."""
    court.heard.clear()
    judging = asyncio.ensure_future(court.justice.run())
    try:
        async with asyncio.timeout(30):
            await line.accuser.bring(case)
            await court.heard.wait()
    finally:
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
    return court.judged[-1]


def content(event: dict[str, Any]) -> bytes:
    """Of the file that a ban rests on."""
    return Path(event["evidence"]).read_bytes()


def refuse(body: bytes) -> bytes:
    raise TransientError("not here any more")


def test_members_send_the_past_and_the_file_is_the_one_that_was_brought(court: Court) -> None:
    async def play() -> None:
        begun(court)
        case, given, line = wrong_work(court.past, STEP, all_over=True), list[str](), Line(court)
        whole = case.to_evidence(court.past.signed).to_bytes()
        serve(court, third(court.past), given, spoil=lambda body: body)
        event = await judged(court, line, case)
        assert event["event"] == "banned"
        assert content(event) == whole
        past_bytes = sum(map(len, (*case.state_chunks, *(body for bodies in case.bodies for body in bodies))))
        assert past_bytes > 0.5 * len(whole)
        assert line.sent_bytes < len(whole) - past_bytes + 1000  # its last bytes are asked for more than once
        num_chunks = len(case.state_chunks)
        assert num_chunks > 0
        assert given == num_chunks * [CHUNK] + sum(map(len, case.bodies)) * [PART_BYTES], "those of a length together"

    asyncio.run(play())


@pytest.mark.parametrize("member", ["refuses", "lies", "is gone"])
def test_what_no_member_gives_its_accuser_brings(court: Court, member: str) -> None:
    async def play() -> None:
        begun(court)
        case, given, line = wrong_work(court.past, STEP, all_over=True), list[str](), Line(court)
        whole = case.to_evidence(court.past.signed).to_bytes()
        if member != "is gone":
            spoil = refuse if member == "refuses" else lambda body: body[:-1] + bytes([body[-1] ^ 1])
            serve(court, third(court.past), given, spoil=spoil)
        event = await judged(court, line, case)
        assert event["event"] == "banned"
        assert content(event) == whole
        assert line.sent_bytes > len(whole)

    asyncio.run(play())


def test_for_a_state_that_the_host_does_not_know_it_asks_nobody(court: Court) -> None:
    async def play() -> None:
        begun(court, is_anchored=False)
        case, given, line = wrong_work(court.past, STEP, all_over=True), list[str](), Line(court)
        serve(court, third(court.past), given, spoil=lambda body: body)
        assert (await judged(court, line, case))["event"] == "banned"
        assert not given
        assert line.sent_bytes == len(case.to_evidence(court.past.signed).to_bytes())

    asyncio.run(play())


@pytest.mark.parametrize("again_after", [15, 16])
def test_members_send_a_past_for_one_accuser_once_in_sixteen_versions(
    court: Court, again_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        begun(court)
        untrue = Evidence.from_bytes(court.past.untrue(STEP), max_bytes=1 << 26)
        given, line = list[str](), Line(court)
        serve(court, third(court.past), given, spoil=lambda body: body)
        assert (await judged(court, line, ReplayMismatch.from_evidence(untrue)))["event"] == "acquitted"
        once, now = len(given), int(court.followed[STAGE].version)
        assert once
        monkeypatch.setattr(court.justice._incoming, "_now", lambda stage: Version(now + again_after))
        case, before = wrong_work(court.past, STEP, all_over=True), line.sent_bytes
        assert (await judged(court, line, case))["event"] == "banned"
        assert len(given) == (2 * once if again_after >= HELPED_EVERY else once)
        whole = len(case.to_evidence(court.past.signed).to_bytes())
        assert (line.sent_bytes - before == whole) == (again_after < HELPED_EVERY)

    asyncio.run(play())


@pytest.mark.parametrize("lie", ["more bodies than blobs", "a huge chunk", "another accused", "one who is out"])
def test_a_head_that_asks_for_more_than_there_is_has_nobody_send_anything(court: Court, lie: str) -> None:
    """Whoever is a member may write any head; the host counts before it makes room."""

    async def play() -> None:
        begun(court)
        evidence = wrong_work(court.past, STEP, all_over=True).to_evidence(court.past.signed)
        body = evidence.to_bytes()
        end = head_end(body)
        assert end is not None
        head = EvidenceHead.from_bytes(body[:end])
        accused = head.accused
        if lie == "more bodies than blobs":
            facts = cast(dict[str, Any], head.facts)
            head = replace(head, facts={**facts, "num_bodies": [1 << 40, *facts["num_bodies"][1:]]})
        elif lie == "a huge chunk":
            head = replace(head, blobs=(replace(head.blobs[0], size=CHUNK_BYTES + 1), *head.blobs[1:]))
        elif lie == "another accused":
            accused = third(court.past).peer_id
        else:
            court.justice.bans[accused] = cast(Any, None)
        packed = pack(head.to_value())
        told = MAGIC + len(packed).to_bytes(4, "little") + packed
        piece = AccusationPiece(accused, bytes(32), len(body) + CHUNK_BYTES, 0)
        taken = await court.justice._incoming.take(court.past.auditor.peer_id, piece, told, is_member=True)
        assert taken.next == len(told)

    asyncio.run(play())


def test_a_case_that_comes_too_early_is_refused_by_its_head(court: Court) -> None:
    async def play() -> None:
        begun(court)
        stage = FollowedStage(court.followed[STAGE].chain, court.prepared.settings)
        court.followed[STAGE] = begins = FollowedStage(
            StageChain.begin(court.past.genesis, court.prepared.settings), court.prepared.settings
        )
        assert begins.version < STEP - 1 <= stage.version
        case, given, line = wrong_work(court.past, STEP, all_over=True), list[str](), Line(court)
        serve(court, third(court.past), given, spoil=lambda body: body)
        with pytest.raises(TransientError, match="evidence of version 4; stage 1 is at 0"):
            await line.accuser.bring(case)
        assert not given
        assert line.sent_bytes < 0.5 * len(case.to_evidence(court.past.signed).to_bytes())

    asyncio.run(play())


def test_who_begins_with_another_case_leaves_nothing_of_the_first(court: Court) -> None:
    """The first one's past is on its way when the other's head comes."""

    async def play() -> None:
        begun(court)
        line, asked, rests = Line(court), asyncio.Event(), asyncio.Event()
        donor = court.network.transport(third(court.past))

        async def on_chunk(sender: PeerId, request: Message) -> Message:
            asked.set()
            await rests.wait()
            return Message({}, court.past.state[cast(int, request.meta["index"])])

        donor.serve(CHUNK, on_chunk, max_body_bytes=0)
        bringing = asyncio.ensure_future(line.accuser.bring(wrong_work(court.past, STEP)))
        await asyncio.wait_for(asked.wait(), 10.0)
        bringing.cancel()
        await asyncio.gather(bringing, return_exceptions=True)
        other = wrong_work(court.past, STEP + 1).to_evidence(court.past.signed).to_bytes()
        piece = AccusationPiece(court.past.target.peer_id, other[-32:], len(other), 0)
        await court.justice._incoming.take(court.past.auditor.peer_id, piece, other[:100], is_member=True)
        rests.set()
        await asyncio.sleep(0.3)
        folder = court.prepared.folder.root / "accusations"
        assert len(await asyncio.to_thread(lambda: [*folder.iterdir()])) == 1
        court.justice._incoming.close()
        assert not await asyncio.to_thread(lambda: [*folder.iterdir()])

    asyncio.run(play())


def test_a_case_that_names_another_past_is_no_evidence(court: Court) -> None:
    """What members give is not what the head names: its accuser brings that, and the judge looks at the anchor."""

    async def play() -> None:
        begun(court)
        case, given, line = wrong_work(court.past, STEP, all_over=True), list[str](), Line(court)
        serve(court, third(court.past), given, spoil=lambda body: body)
        first = bytearray(case.state_chunks[0])
        first[-1] ^= 1
        bent = replace(case, state_chunks=(bytes(first), *case.state_chunks[1:]))
        assert (await judged(court, line, bent))["event"] == "dismissed"
        assert line.sent_bytes > len(bent.to_evidence(court.past.signed).to_bytes())

    asyncio.run(play())
