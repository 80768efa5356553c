"""What a target owes an auditor that was not served: the host asks for it, and gets the answer, or writes a debt."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from bootstrap.round.followed_stage import FollowedStage
from bootstrap.state.run_folder import PreparedRun
from swarm.averaging.parts import Parts
from swarm.core.audit.chance import REVEALED_AFTER
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.kept import keep_newest
from swarm.core.round.contribution import Roster
from swarm.host_protocol import EXHIBIT, HOP, OWED, PART, max_exhibit_bytes
from swarm.model.families import validate_config
from swarm.network.transport import Message, Transport
from verification.audit.owed import Asked, OwedAudit, check_owed, check_owed_hop, read_exhibit, read_hop, read_part
from verification.pipeline.exchanges import MAX_EXCHANGES

ASK_AT_ONCE = 4
REVEAL_WAITS = 50
"""Of 0.1 s."""
PING_S = 3.0
RESTART_VERSIONS = 8
"""A peer that is admitted again owes nothing from before, for what it kept died with its process; after the first time
once in so many versions, or whoever withholds would be admitted again and again. And only if it was away: a process
that was started again signs nothing within two steps of what the one before it signed."""

MAX_SHOWN = 1 << 14

Indebted = Callable[[OwedAudit, str], Awaitable[None]]


class OwedAudits:
    """Asks targets again, where auditors say that they were not served."""

    def __init__(
        self,
        run: PreparedRun,
        transport: Transport,
        tickets: Mapping[PeerId, Ticket],
        followed: Mapping[int, FollowedStage],
        is_out: Callable[[PeerId], bool],
        on_debt: Indebted,
    ) -> None:
        """`on_debt` is told what a target owes, and why."""
        self._run = run
        self._transport = transport
        self._tickets = tickets
        self._followed = followed
        self._is_out = is_out
        self._indebted = on_debt
        self._largest_exhibit, self._largest_part = _largest_answers(run)
        self._restarted_at: dict[PeerId, int] = {}
        self._begun_at: dict[PeerId, int] = {}
        """Version of its stage when the peer's process began, as far as is believed."""
        self._versions_at_start = {stage: int(one.version) for stage, one in followed.items()}
        """Of each stage, when this process began: who was admitted before is believed to have begun by then."""
        self._asking = asyncio.Semaphore(ASK_AT_ONCE)
        self._shown: dict[Asked, None] = {}
        """What targets have shown, or are asked for: an auditor gets it twice at most, so one that asks again and again
        must make no debt."""

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        transport.serve(OWED, self._on_owed, max_body_bytes=0)

    def admitted(self, peer: PeerId, version: Version) -> None:
        """The peer's process has begun, at that version of its stage."""
        if peer not in self._begun_at:
            self._begun_at[peer] = int(version)
        elif version >= self._restarted_at.get(peer, -RESTART_VERSIONS) + RESTART_VERSIONS:
            self._begun_at[peer] = self._restarted_at[peer] = int(version)

    def _version(self, stage: StageIndex) -> int:
        followed = self._followed.get(stage)
        return int(followed.version) if followed is not None else 0

    async def _on_owed(self, sender: PeerId, request: Message) -> Message:
        """Ask for an auditor what a target did not serve it: the answer, or RemoteError("debt") if it owes it now."""
        fields = Fields("owed call", request.meta)
        owed = OwedAudit.from_value(fields.message("owed"))
        fields.done()
        ticket, followed = self._tickets.get(sender), self._followed.get(owed.stage)
        if ticket is None or owed.auditor != sender or owed.target == sender:
            raise RemoteError("standing", f"{sender} has no ticket for that audit", sender)
        roster = followed.roster(int(owed.step)) if followed is not None else None
        if roster is None or self._is_out(owed.target):
            raise TransientError(f"step {owed.step} of stage {owed.stage}, or {owed.target}, is not known here")
        await self._revealed(owed)
        self._check_in_time(owed)
        async with self._asking:
            check = await asyncio.to_thread(self._check_owed, owed, ticket, roster)
            if owed.asked in self._shown:
                raise RemoteError("served", f"{owed.target} has shown that, and owes it no more", sender)
            self._shown[owed.asked] = None
            keep_newest(self._shown, MAX_SHOWN)
            try:
                return await self._ask(owed, ticket, check)
            except (TransientError, RemoteError) as error:
                reason = str(error)
                self._shown.pop(owed.asked, None)
            # A target that is gone has crashed, which is no fault.
            await self._transport.call(owed.target, "ping", Message(), timeout_s=PING_S, max_body_bytes=0)
        self._check_in_time(owed)
        await self._indebted(owed, reason)
        raise RemoteError("debt", f"{owed.target} owes {owed.what} {owed.number} of step {owed.step}: {reason}")

    def _check_owed(self, owed: OwedAudit, ticket: Ticket, roster: Roster) -> Callable[[Message], object]:
        """What an answer must pass."""
        settings, run_id = self._run.settings, self._run.run_id
        owed.check(run_id=run_id)
        if owed.what == "hop":
            header = check_owed_hop(owed, ticket, roster, settings, run_id=run_id)
            return lambda reply: read_hop(reply.meta, reply.body, header, settings, run_id=run_id)
        contribution = check_owed(owed, ticket, roster, settings.audits)
        if owed.what == "part":
            return lambda reply: read_part(reply.body, contribution, owed.number)
        work = next(item for item in contribution.work if item.microbatch_id == owed.number)
        stages = settings.model.num_stages
        return lambda reply: read_exhibit(reply.meta, reply.body, contribution, work, run_id=run_id, num_stages=stages)

    async def _revealed(self, owed: OwedAudit) -> None:
        """Results come here a little later than to the auditor: wait for what it must have seen."""
        for _ in range(REVEAL_WAITS):
            if self._version(owed.stage) >= int(owed.step) + REVEALED_AFTER:
                return
            await asyncio.sleep(0.1)

    def _check_in_time(self, owed: OwedAudit) -> None:
        """Raises TransientError for what an honest target need not have: not yet, not any more, or lost in a crash."""
        step, version = int(owed.step), self._version(owed.stage)
        begun = self._begun_at.get(owed.target)
        if begun is None and owed.target in self._tickets:
            begun = self._versions_at_start.get(owed.stage, 0)
        if begun is None or (step <= begun and self._was_away(owed, begun)):
            raise TransientError(f"{owed.target} has begun at version {begun}: it owes nothing of step {step}")
        if not step + REVEALED_AFTER <= version <= step + self._run.settings.audits.retained_versions:
            raise TransientError(f"stage {owed.stage} is at version {version}: nobody is owed anything of step {step}")

    def _was_away(self, owed: OwedAudit, begun: int) -> bool:
        """Whether the target missed a round about when it says that its process began, or may still miss one: who was
        in all of them has only asked for admission again, and owes what it owed."""
        followed = self._followed.get(owed.stage)
        rosters = [followed.roster(step) if followed is not None else None for step in range(begun - 1, begun + 2)]
        return any(roster is None or roster.contribution_of(owed.target) is None for roster in rosters)

    async def _ask(self, owed: OwedAudit, ticket: Ticket, check: Callable[[Message], object]) -> Message:
        """The target's answer, if it is what its contribution, or its header, was made from."""
        meta: dict[str, Value] = {"step": owed.step, "ticket": ticket.to_value(), "reveal": owed.reveal}
        if owed.what == "part":
            method, largest = PART, self._largest_part
            meta |= {"part": owed.number, "of": owed.target}
        elif owed.what == "exhibit":
            method, largest = EXHIBIT, self._largest_exhibit
            meta |= {"microbatch_id": owed.number}
        else:
            assert owed.header is not None
            method, largest = HOP, MAX_EXCHANGES * self._largest_exhibit
            digest = owed.header.digest()
            meta |= {"microbatch_id": owed.number, "target": owed.target, "contribution": None, "header": digest}
        call_s = self._run.settings.deadlines.call_s
        reply = await self._transport.call(owed.target, method, Message(meta), timeout_s=call_s, max_body_bytes=largest)
        await asyncio.to_thread(check, reply)
        return reply


def _largest_answers(run: PreparedRun) -> tuple[int, int]:
    """Bytes of the largest exhibit and of the largest encoded part that a peer may show."""
    settings = run.settings
    hidden_size = validate_config(settings.model.config_json).hidden_size
    layout = max((state.layout for state in run.states), key=lambda layout: layout.num_values)
    parts = Parts.of(settings, layout)
    largest = max(map(parts.result_bytes, range(len(parts))))
    return max_exhibit_bytes(settings, hidden_size), largest
