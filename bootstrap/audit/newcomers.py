"""Newcomers' agreements, counted by the host, which promotes those who have enough, a few in a version."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from bootstrap.audit.beacon import HostBeacon
from bootstrap.round.followed_stage import FollowedStage
from swarm.core.audit.ticket import Ticket
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.settings import RunSettings
from swarm.host_protocol import AGREED
from swarm.network.transport import Message, Transport
from verification.audit.probation import Agreement, Probation
from verification.audit.standing import StandingTable
from verification.audit.verdicts import Promotion

log = logging.getLogger(__name__)

Promote = Callable[[PeerId, StageIndex, Version], Awaitable[Promotion]]


class Newcomers:
    """Those on probation in each stage. A host that is started again counts anew."""

    def __init__(
        self,
        settings: RunSettings,
        run_id: str,
        followed: Mapping[int, FollowedStage],
        tickets: Mapping[PeerId, Ticket],
        beacon: HostBeacon,
        table: Callable[[], StandingTable],
        promote: Promote,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self._run_id = run_id
        self._followed = followed
        self._tickets = tickets
        self._beacon = beacon
        self._table = table
        self._promote = promote
        self._emit = emit
        self._stages = [Probation(settings.audits.agreements_to_promote) for _ in range(settings.model.num_stages)]
        self._promotions: dict[PeerId, Promotion] = {}
        """The last of each peer."""

    def serve(self, transport: Transport) -> None:
        transport.serve(AGREED, self._on_agreed, max_body_bytes=0)

    def promotion_of(self, peer: PeerId) -> Promotion | None:
        """What lets the peer train, if it was promoted and has not been sent back since."""
        return self._promotions.get(peer) if self._table().may_train(peer) else None

    def remember(self, promotion: Promotion) -> None:
        """Of this host, now or before it was started again."""
        self._promotions[promotion.peer_id] = promotion

    async def _on_agreed(self, sender: PeerId, request: Message) -> Message:
        """One agreement more: the promotion, once there is one."""
        fields = Fields("agreed call", request.meta)
        agreement = Agreement.from_value(fields.message("agreement"))
        fields.done()
        ticket = self._tickets.get(sender)
        followed = self._followed.get(agreement.stage)
        if ticket is None or agreement.newcomer != sender:
            raise RemoteError("standing", f"{sender} has no ticket, or brings another's agreement", sender)
        table = self._table()
        if table.may_train(sender):
            return Message({"promotion": value_or_none(self._promotions.get(sender))})
        roster = followed.roster(int(agreement.step)) if followed is not None else None
        chain = followed.chain_at(int(agreement.step)) if followed is not None else None
        if followed is None or roster is None or chain is None:  # results come here a little later than to the newcomer
            raise TransientError(f"step {agreement.step} of stage {agreement.stage} is not known here")
        basis, beacon = chain.basis, self._beacon.of(roster)
        await asyncio.to_thread(
            agreement.check, run_id=self._run_id, ticket=ticket, roster=roster, basis=basis, beacon=beacon
        )
        version, stage, since = followed.version, int(agreement.stage), table.on_probation_since(sender)
        held = self._stages[stage] = self._stages[stage].after(agreement, int(version))
        count = held.count(sender, int(version), since=since)
        log.info("%s has %d agreements at version %d of stage %d", sender, count, version, stage)
        latest = followed.roster(int(version) - 1)
        num_members, num_left = len(followed.chain.members), len(latest.leaves) if latest is not None else 0
        if not held.may_promote(sender, int(version), since=since, num_members=num_members, num_left=num_left):
            return Message({"promotion": None})
        self._stages[stage] = held.promoted(sender, int(version))
        promotion = await self._promote(sender, agreement.stage, Version(max(int(version), since + 1)))
        self._emit({"event": "promoted", "peer_id": sender, "stage": stage, "step": promotion.version})
        return Message({"promotion": promotion.to_value()})
