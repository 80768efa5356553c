"""How the host keeps up with its stages: through results it missed, and through its own restarts."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bootstrap.program.ledger import Ledger
from bootstrap.round.followed_stage import Certified, FollowedStage
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Result
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.host_protocol import MAX_RESULTS_PER_CALL, RESULTS
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

MAX_BEHIND = 2
"""Versions; a result that is still under way is not asked for."""
ASKED_AT_ONCE = 3
CALL_S = 5.0


class Following(Mapping[int, FollowedStage]):
    """The stages whose chains this host has from their genesis, or from a version that it wrote down."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        transport: Transport,
        certified: Callable[[Certified], None],
    ) -> None:
        """`certified` is told every result, in each stage's order; after a restart some of them again."""
        self._certified = certified
        self._settings = settings
        self._ledger = ledger
        self._transport = transport
        self._stages: dict[int, FollowedStage] = {}
        self.before_amendment: dict[PeerId, int] = {}
        """Tokens that each member did last, before the run was amended; empty once the stages have begun again."""

    def __getitem__(self, stage: int) -> FollowedStage:
        return self._stages[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def recent_work(self) -> dict[PeerId, int]:
        """Tokens that each member of any stage did in its last versions, as far as is certified here."""
        return _work_in(followed.chain for followed in self._stages.values())

    def end_at(self, version: int) -> None:
        """The present era ends at the version."""
        for followed in self._stages.values():
            followed.ends_at = version

    def begin(self, genesis: Genesis) -> FollowedStage:
        """The stage begins, or begins again."""
        self.before_amendment = {}
        made = self._stages[genesis.stage] = FollowedStage(StageChain.begin(genesis, self._settings), self._settings)
        return made

    def take_up(self) -> None:
        """Go on from what an earlier process of this host wrote down last of each stage, since its genesis."""
        last: dict[int, StageChain] = {}
        for event in self._ledger.events("genesis", "chain", "amendment"):
            if event.kind == "amendment":
                self.before_amendment = _work_in(last.values())
                last.clear()
                continue
            if event.kind == "chain":
                chain = StageChain.from_value(event.facts)
            else:
                chain = StageChain.begin(Genesis.from_value(event.facts), self._settings)
                self.before_amendment = {}
            last[chain.stage] = chain
        self._stages = {stage: FollowedStage(chain, self._settings) for stage, chain in last.items()}

    def take(self, result: Result) -> None:
        """A result that somebody sent. Raises RemoteError if it follows and is not certified."""
        followed = self._stages.get(result.roster.stage)
        if followed is None:
            return
        for certified in followed.take(result):
            self._certified(certified)
            chain = followed.at(int(certified.result.roster.step) + 1)
            if chain is not None:
                self._ledger.append("chain", chain.to_value())

    def chain_at(self, stage: int, version: int) -> StageChain | None:
        """What was certified of the version since the stage began last; None if it is not known here any more."""
        followed = self._stages.get(stage)
        found = followed.chain_at(version) if followed is not None else None
        if found is None and followed is not None:
            for event in self._ledger.events("chain"):
                chain = StageChain.from_value(event.facts)
                if (chain.stage, chain.lineage, chain.version) == (stage, followed.chain.lineage, version):
                    found = chain
        return found

    async def catch_up(self, stage: int, peers: Sequence[tuple[int, PeerId]], *, most_behind: int = MAX_BEHIND) -> None:
        """Ask the stage's `peers`, each with the version it reported, for what is missing here."""
        followed = self._stages.get(stage)
        if followed is None:
            return
        for version, peer in sorted(peers, reverse=True)[:ASKED_AT_ONCE]:
            if int(followed.version) + most_behind >= version:
                return
            try:
                while int(followed.version) + most_behind < version and await self._ask(followed, peer):
                    pass
            except (TransientError, RemoteError) as error:
                log.info("stage %d from version %d by %s: %s", stage, followed.version, peer[-6:], error)

    async def _ask(self, followed: FollowedStage, peer: PeerId) -> bool:
        """The peer's next results, taken; whether there were any. Raises TransientError and RemoteError."""
        before = int(followed.version)
        meta: dict[str, Value] = {"from": before, "wait_s": 0.0}
        reply = await self._transport.call(peer, RESULTS, Message(meta), timeout_s=CALL_S, max_body_bytes=0)
        fields = Fields("results", reply.meta)
        for result in fields.items("results", Result.from_value, max_items=MAX_RESULTS_PER_CALL):
            self.take(result)
        return int(followed.version) > before


def _work_in(chains: Iterable[StageChain]) -> dict[PeerId, int]:
    return {peer: done for chain in chains for peer, done in chain.basis.work_of.items()}
