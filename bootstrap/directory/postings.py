"""Who is on the way to another stage, by the run key's word: told until it has arrived, or does not count any more."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bootstrap.owner.progress import RunProgress
from bootstrap.round.asking import of_each
from bootstrap.round.followed_stage import FollowedStage
from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.transfer import states_s
from swarm.core.canonical import signed_bytes
from swarm.core.directory.posting import Posting
from swarm.core.ids import PeerId, StageIndex
from swarm.host_protocol import POST
from swarm.model.stack import stage_layout
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

TELL_EVERY_S, TELL_S = 1.0, 3.0


@dataclass(frozen=True)
class _UnderWay:
    posting: Posting
    comes_by: float
    """To the host, for its ticket: by then it has drained and left."""
    over_at: float


class Postings:
    """Of one run. A host that is started again posts anew."""

    def __init__(
        self,
        run: PreparedRun,
        transport: Transport,
        progress: RunProgress,
        followed: Mapping[int, FollowedStage],
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        """`followed`: the stages whose certified past is known here."""
        settings = run.settings
        self._run = run
        self._transport = transport
        self._progress = progress
        self._followed = followed
        self._emit = emit
        self._under_way: dict[PeerId, _UnderWay] = {}
        self._comes_s = settings.deadlines.drain_s + 2 * settings.deadlines.lease_s + settings.deadlines.call_s
        sizes = [stage_layout(settings.model, stage).num_values for stage in range(settings.model.num_stages)]
        self.arrives_s = self._comes_s + states_s(settings, [max(sizes)])
        """Seconds that a posted peer may take."""
        self._num_posted = 0

    def post(self, peer: PeerId, source: StageIndex, target: StageIndex, reason: str) -> None:
        """The peer is to go from one stage to the other."""
        chain, run, now = self._followed[source].chain, self._run, time.monotonic()
        made = Posting(run.run_id, peer, source, target, chain.era, chain.version).signed_by(run.run_key)
        self._under_way[peer] = _UnderWay(made, now + self._comes_s, now + self.arrives_s)
        self._num_posted += 1
        self._emit({"event": "posted", "peer_id": peer, "from": source, "stage": target, "reason": reason})

    def seed(self, target: StageIndex) -> bytes:
        """To draw by who is posted there: nobody but the run key can know it, and it is another after each posting."""
        chain = self._followed[target].chain
        named = signed_bytes("posting-seed", [chain.run_id, target, chain.era, chain.version, self._num_posted])
        return hashlib.sha256(self._run.run_key.sign(named)).digest()

    @property
    def are_under_way(self) -> bool:
        """Whether somebody is posted, and is not a member where it goes to yet."""
        return bool(self._alive())

    def target_of(self, peer: PeerId) -> StageIndex | None:
        """Where the peer is on its way to."""
        held = self._alive().get(peer)
        return held.posting.target if held is not None else None

    def coming(self, target: int) -> set[PeerId]:
        """Who is to come to the stage and may yet: not who should have been at the host's door long ago."""
        now = time.monotonic()
        return {
            peer
            for peer, held in self._alive().items()
            if held.posting.target == target and (now < held.comes_by or self._has_come(held.posting))
        }

    def _alive(self) -> dict[PeerId, _UnderWay]:
        now = time.monotonic()
        self._under_way = {
            peer: held for peer, held in self._under_way.items() if now < held.over_at and not self._is_there(held)
        }
        return self._under_way

    def _is_there(self, held: _UnderWay) -> bool:
        """A member of the stage it was posted to."""
        followed = self._followed.get(held.posting.target)
        return followed is not None and held.posting.peer_id in followed.chain.members

    def _has_come(self, posting: Posting) -> bool:
        """It has its ticket for the stage."""
        figures = self._progress.peers.get(posting.peer_id)
        return figures is not None and figures.stage == posting.target

    async def run_for_ever(self) -> None:
        """Tell those who have not come yet."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            waited_for = {peer: held.posting for peer, held in self._alive().items()}
            untold = {peer: posting for peer, posting in waited_for.items() if not self._has_come(posting)}

            async def tell(peer: PeerId, told: Mapping[PeerId, Posting] = untold) -> Message:
                message = Message({"posting": told[peer].to_value()})
                return await self._transport.call(peer, POST, message, timeout_s=TELL_S, max_body_bytes=0)

            await of_each(untold, tell)
