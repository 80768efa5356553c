"""What a misbehaving peer says and hears: the transport and the directory of an honest one, with lies in between."""

from collections.abc import Mapping
from dataclasses import replace

from peer.adversary.hooks import Liar
from peer.audit.desk import INPUT
from peer.audit.exams import EXAM, EXAM_ANSWER
from peer.audit.hop_desk import PASSED
from peer.audit.jury import JURY
from peer.pipeline.downstream import ROOM
from peer.round.mail.mail import ROUND
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import merkle_root
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.host_protocol import EXHIBIT, HOP, MAX_CASE_BYTES, PART, PLEA, STATE
from swarm.identity.key import Identity
from swarm.network.transport import Directory, Handler, Message, Transport, TransportAround
from swarm.witness_service import WITNESS
from verification.audit.evidence import Evidence
from verification.audit.probation import Agreement
from verification.audit.tolerance import Grade
from verification.audit.verdicts import Accusation, JurorVote, Plea
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.mismatch import Mismatch, mismatch_of
from verification.round.papers import Bytes
from verification.state.state_statement import StateStatement

AUDITED = frozenset({EXHIBIT, PART, INPUT, PASSED, HOP})
"""By these calls a peer shows what it did."""


class FalseTransport(TransportAround):
    """A transport whose answers and calls are the adversary's where it has another word."""

    def __init__(self, inner: Transport, me: Identity, liar: Liar) -> None:
        super().__init__(inner)
        self._me = me
        self._liar = liar
        self._examined: dict[tuple[PeerId, Step], dict[str, Value]] = {}
        """What newcomers asked for when they were shown their exams."""

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def answered(sender: PeerId, request: Message) -> Message:
            return await self._answered(sender, method, request, handler)

        self._inner.serve(method, answered, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == STATE:
            request = self._stated(request)
        reply = await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
        if method == WITNESS and reply.meta.get("there") and self._liar.adversary.hears_nobody(_step_of(request)):
            return replace(reply, meta={**reply.meta, "there": []})
        return reply

    # -- lies ---------------------------------------------------------------------------------------------

    async def _answered(self, sender: PeerId, method: str, request: Message, handler: Handler) -> Message:
        adversary = self._liar.adversary
        if method in AUDITED and adversary.withholds:
            raise TransientError("not now")
        if method == ROUND and self._is_deaf_to(sender, request):
            return Message({"status": "ok"})
        if method == PLEA and adversary.stands_by_its_work:
            return self._insisting(request)
        if method == JURY:
            return await self._voting(sender, request, handler)
        if method == EXAM_ANSWER and adversary.is_lazy(_step_of(request)):
            return await self._agreeing(sender, request, handler)
        reply = await handler(sender, request)
        if method == EXAM:
            self._examined[sender, _step_of(request)] = request.meta
        if method == ROOM:
            waits_s = adversary.says_waits_s(self._liar.step, Fields("room answer", reply.meta).number("waits_s"))
            return replace(reply, meta={**reply.meta, "waits_s": waits_s})
        return reply

    def _is_deaf_to(self, sender: PeerId, request: Message) -> bool:
        """As a leader: whether a member's commitment, or word of another's, is as if it had not come."""
        step, liar, kind = _step_of(request), self._liar, request.meta.get("kind")
        if kind == "there":
            return liar.adversary.hears_nobody(step)
        is_ignored = step >= liar.step and liar.adversary.ignores(step, liar.members, sender, me=self._me.peer_id)
        return kind == "commit" and is_ignored

    def _insisting(self, request: Message) -> Message:
        """Asked to do its work again, it says that it comes to the same."""
        evidence = Evidence.from_bytes(request.body, max_bytes=MAX_CASE_BYTES)
        bodies = _claimed(mismatch_of(evidence))
        found = tuple(bulk_digest(body) for body in bodies)
        plea = Plea(evidence.run_id, self._me.peer_id, evidence.stage, evidence.version, evidence.digest(), found)
        sizes: list[Value] = [len(body) for body in bodies]
        return Message({"plea": plea.signed_by(self._me).to_value(), "sizes": sizes}, b"".join(bodies))

    async def _voting(self, sender: PeerId, request: Message, handler: Handler) -> Message:
        """As a juror: without a replay, or the other way round."""
        fields = Fields("jury call", request.meta)
        accusation = Accusation.from_value(fields.message("charge"))
        step = Step(fields.integer("committed_at"))
        guilty = False
        if not self._liar.adversary.is_lazy(step):
            reply = await handler(sender, request)
            vote = JurorVote.from_value(Fields("jury answer", reply.meta).message("vote"))
            guilty = vote.verdict is Grade.FRAUD
        grade = Grade.FRAUD if self._liar.adversary.finds(guilty) else Grade.HONEST
        vote = JurorVote(*accusation.facts, sender, step, self._me.peer_id, grade).signed_by(self._me)
        return Message({"vote": vote.to_value()})

    async def _agreeing(self, newcomer: PeerId, request: Message, handler: Handler) -> Message:
        """As an examiner: whatever the newcomer has come to is right."""
        try:
            return await handler(newcomer, request)
        except RemoteError as error:
            step = _step_of(request)
            asked = self._examined.get((newcomer, step))
            if error.kind != "exam" or asked is None:
                raise
            fields = Fields("exam request", asked)
            ticket = Ticket.from_value(fields.message("ticket"))
            agreement = Agreement(
                run_id=ticket.run_id,
                stage=ticket.stage,
                step=step,
                newcomer=newcomer,
                examiner=self._me.peer_id,
            )
            return Message({"agreement": agreement.signed_by(self._me).to_value()})

    def _stated(self, request: Message) -> Message:
        """Of a snapshot's state, to the host."""
        statement = StateStatement.from_value(Fields("state", request.meta).message("statement"))
        body = bytes(request.body)
        hashes = tuple(body[start : start + 32] for start in range(0, len(body), 32))
        said = self._liar.adversary.stated(Step(int(statement.version)), hashes)
        if said is hashes:
            return request
        root = merkle_root(said, statement.total_bytes)
        statement = replace(statement, state_digest=root, signature=b"").signed_by(self._me)
        return Message({"statement": statement.to_value()}, b"".join(said))


class FalseDirectory:
    """A directory to which the adversary says of the peer what it likes."""

    def __init__(self, inner: Directory, liar: Liar) -> None:
        self._inner = inner
        self._liar = liar

    async def publish(self, topic: str, fields: Mapping[str, Value], *, ttl_s: float) -> None:
        if self._liar.adversary.acts_in(self._liar.step):
            fields = self._liar.adversary.says(self._liar.step, fields)
        await self._inner.publish(topic, fields, ttl_s=ttl_s)

    async def lookup(self, topic: str) -> dict[PeerId, dict[str, Value]]:
        return await self._inner.lookup(topic)

    async def records(self, topic: str) -> dict[PeerId, bytes]:
        return await self._inner.records(topic)

    async def plant(self, topic: str, data: bytes, *, peer_id: PeerId, expires: float) -> None:
        await self._inner.plant(topic, data, peer_id=peer_id, expires=expires)

    @property
    def refused(self) -> int:
        return self._inner.refused

    async def close(self) -> None:
        await self._inner.close()


def _claimed(case: Mismatch) -> tuple[Bytes, ...]:
    """What the accused had sent."""
    if isinstance(case, HopMismatch):
        return (case.claim.claimed,)
    return tuple(case.parts) or (case.exhibits[0].y, case.exhibits[0].grad_x)


def _step_of(request: Message) -> Step:
    step = request.meta.get("step")
    return Step(step if isinstance(step, int) else 0)
