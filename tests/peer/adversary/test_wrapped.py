"""What a misbehaving peer says over an honest one's transport and directory; all else passes as it is."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from peer.adversary.hooks import Adversary, At
from peer.adversary.kinds import parse
from peer.adversary.wrapped import AUDITED, FalseDirectory, FalseTransport
from peer.audit.jury import JURY
from peer.pipeline.downstream import ROOM
from peer.round.mail.mail import ROUND
from swarm.checkpoint.state import merkle_root
from swarm.core.canonical import Value
from swarm.core.errors import TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.host_protocol import STATE
from swarm.identity.key import Identity
from swarm.network.transport import Directory, Handler, Message, Transport
from swarm.witness_service import WITNESS
from verification.audit.tolerance import Grade
from verification.audit.verdicts import Accusation, JurorVote
from verification.state.state_statement import StateStatement

ME, OTHER, HOST = (Identity.from_seed(bytes([number]) * 32) for number in range(3))
BEGINS = Step(4)


@dataclass
class Liar:
    """As far as its transport looks at it."""

    adversary: Adversary
    step: Step = BEGINS
    members: tuple[PeerId, ...] = (ME.peer_id, OTHER.peer_id)


@dataclass
class Line:
    """What was served, called and published."""

    served: dict[str, Handler] = field(default_factory=dict)
    called: list[Message] = field(default_factory=list)
    replies: Message = field(default_factory=Message)
    published: list[Mapping[str, Value]] = field(default_factory=list)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        self.served[method] = handler

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        self.called.append(request)
        return self.replies

    async def publish(self, topic: str, fields: Mapping[str, Value], *, ttl_s: float) -> None:
        self.published.append(fields)


def answer(kind: str, method: str, request: Message, reply: Message, *, step: Step = BEGINS) -> Message:
    """Of a peer under the attack, at a step, whose honest part would reply so."""
    line, liar = Line(), Liar(parse(f"{kind}@{BEGINS}", seed="liar"), step)
    liar.adversary.adding(At(step, MicrobatchId(0)), torch.zeros(1))

    async def honest(sender: PeerId, request: Message) -> Message:
        return reply

    FalseTransport(cast(Transport, line), ME, liar).serve(method, honest, max_body_bytes=0)

    async def main() -> Message:
        return await line.served[method](OTHER.peer_id, request)

    return asyncio.run(main())


@pytest.mark.parametrize("method", sorted(AUDITED))
def test_who_withholds_shows_nothing_once_the_attack_has_begun(method: str) -> None:
    shown = Message({}, b"shown")
    assert answer("withholding", method, Message(), shown, step=Step(BEGINS - 1)) is shown
    with pytest.raises(TransientError, match="not now"):
        answer("withholding", method, Message(), shown)
    assert answer("sign_flip", method, Message(), shown) is shown


def test_who_boasts_has_always_room() -> None:
    said = Message({"waits_s": 3.5, "is_held": False})
    assert answer("inflated_records", ROOM, Message(), said).meta == {"waits_s": 0.0, "is_held": False}
    assert answer("sign_flip", ROOM, Message(), said).meta == said.meta


def test_a_leader_that_omits_one_does_not_hear_its_commitment() -> None:
    heard = Message({"status": "heard"})
    assert answer("omitting_leader", ROUND, Message({"kind": "commit", "step": int(BEGINS)}), heard).meta == {
        "status": "ok"
    }
    for meta in ({"kind": "vote", "step": int(BEGINS)}, {"kind": "commit", "step": int(BEGINS) - 1}):
        assert answer("omitting_leader", ROUND, Message(cast(Any, meta)), heard) is heard


def test_nor_does_it_hear_of_it_from_other_members() -> None:
    named, heard = Message({"kind": "there", "step": int(BEGINS)}), Message({"status": "heard"})
    assert answer("omitting_leader", ROUND, named, heard).meta == {"status": "ok"}
    assert answer("sign_flip", ROUND, named, heard) is heard


def test_nor_does_it_hear_of_it_from_voters_outside() -> None:
    there = Message({"vote": None, "there": [{}]})
    asked = Message({"step": int(BEGINS)})
    for kind, heard in (("omitting_leader", []), ("sign_flip", [{}])):
        line = FalseTransport(cast(Transport, Line(replies=there)), ME, Liar(parse(f"{kind}@{BEGINS}", seed="liar")))
        reply = asyncio.run(line.call(HOST.peer_id, WITNESS, asked, timeout_s=1.0, max_body_bytes=0))
        assert reply.meta == {"vote": None, "there": heard}


@pytest.mark.parametrize(
    ("kind", "found", "said"),
    [
        ("lying_juror", Grade.FRAUD, Grade.HONEST),
        ("lying_juror", Grade.HONEST, Grade.FRAUD),
        ("lazy_auditor", Grade.FRAUD, Grade.HONEST),
        ("sign_flip", Grade.FRAUD, Grade.FRAUD),
    ],
)
def test_a_juror_votes_as_its_attack_has_it(kind: str, found: Grade, said: Grade) -> None:
    charge = Accusation("run", HOST.peer_id, StageIndex(1), Version(4), "replay_mismatch", bytes(32))
    honest = JurorVote(*charge.facts, OTHER.peer_id, BEGINS, ME.peer_id, found).signed_by(ME)
    asked = Message({"charge": charge.to_value(), "committed_at": int(BEGINS)})
    reply = answer(kind, JURY, asked, Message({"vote": honest.to_value()}))
    vote = JurorVote.from_value(reply.meta["vote"])
    vote.check("run")
    assert (vote.verdict, vote.facts, vote.accuser) == (said, charge.facts, OTHER.peer_id)


@pytest.mark.parametrize(("kind", "is_changed"), [("wrong_state", True), ("sign_flip", False)])
def test_another_chunk_is_stated_and_signed_for(kind: str, is_changed: bool) -> None:
    hashes, total = (bytes([1]) * 32, bytes([2]) * 32), 1 << 20
    statement = StateStatement(
        run_id="run",
        stage=StageIndex(1),
        version=Version(BEGINS),
        name=bytes(32),
        peer_id=ME.peer_id,
        state_digest=merkle_root(hashes, total),
        total_bytes=total,
    ).signed_by(ME)
    line = Line()
    transport = FalseTransport(cast(Transport, line), ME, Liar(parse(f"{kind}@{BEGINS}")))
    request = Message({"statement": statement.to_value()}, b"".join(hashes))
    asyncio.run(transport.call(HOST.peer_id, STATE, request, timeout_s=1.0, max_body_bytes=0))
    (sent,) = line.called
    said = StateStatement.from_value(sent.meta["statement"])
    said.check(run_id="run")
    body = bytes(sent.body)
    assert said.state_digest == merkle_root([body[:32], body[32:]], total)
    assert (body != b"".join(hashes)) == is_changed
    assert body[:32] == hashes[0]


def test_in_the_directory_it_says_what_it_likes() -> None:
    line = Line()
    directory = FalseDirectory(cast(Directory, line), Liar(parse(f"inflated_records@{BEGINS}")))
    asyncio.run(directory.publish("topic", {"version": 4}, ttl_s=1.0))
    (boast,) = line.published
    assert cast(int, boast["version"]) > 1000
