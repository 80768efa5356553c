"""The state of its stage for a peer that joins, or fell far behind: no donor is believed by itself.

The run key's latest anchor says which state it is. While the host does not say, it is the newest one that more than two
thirds of the stage's members state. Its chunks come from all donors that hold it, each checked against its digest.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.checkpoint.state import StageState
from swarm.checkpoint.transfer import Offer, fetch_chunks, fetch_offer, read_state
from swarm.core.canonical import digest
from swarm.core.errors import AmendedError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.core.transfers import MOST_DONORS
from swarm.host_protocol import ANCHOR
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Message, Transport
from verification.state.anchor import Anchor

log = logging.getLogger(__name__)

LATEST = (1 << 63) - 1
"""The version up to which the host's latest anchor is asked for."""
ASKED_TIMES = 4
"""For a state, as many donors as there are places, until one has it: each time may last as long as a call."""
Find = Callable[[], Awaitable[Sequence[PeerId]]]
"""Who serves the stage by now; they can be called."""


@dataclass(frozen=True)
class ChosenState:
    """Which state to begin from, and what is certified of its version."""

    digest: bytes
    chain: StageChain
    reason: str

    @property
    def version(self) -> Version:
        return self.chain.version


def agreed(members: Collection[PeerId], offers: Mapping[PeerId, Offer]) -> ChosenState | None:
    """The newest state that more than two thirds of the members offer, with the same certified facts; None if none."""
    named: dict[bytes, Offer] = {}
    stated_by: defaultdict[bytes, set[PeerId]] = defaultdict(set)
    for peer in sorted(set(members) & set(offers)):
        offer = offers[peer]
        if offer.chain is not None:
            name = digest("offered-state", [offer.version, offer.digest, offer.chain.to_value()])
            named[name] = offer
            stated_by[name].add(peer)
    chosen: ChosenState | None = None
    for name, offer in named.items():
        num, chain = len(stated_by[name]), offer.chain
        if 3 * num > 2 * len(set(members)) and chain is not None and (chosen is None or chain.version > chosen.version):
            chosen = ChosenState(offer.digest, chain, f"stated by {num} of {len(set(members))} members")
    return chosen


@dataclass
class BrokenOff:
    """What is here of a state whose transfer broke off. It is one state's: tries do not pile up on the disk."""

    chosen: ChosenState | None = None
    chunks: dict[bytes, memoryview] = field(default_factory=dict)
    """By hash."""

    def go_on_with(self, chosen: ChosenState, offer: Offer) -> None:
        """This is the state that comes now: what is here of others, and not of this one, goes."""
        self.chosen = chosen
        for other in self.chunks.keys() - set(offer.hashes):
            del self.chunks[other]

    def clear(self) -> None:
        self.chosen = None
        self.chunks.clear()


@dataclass(frozen=True)
class JoiningState:
    """Chooses and fetches the state of one stage."""

    transport: Transport
    settings: RunSettings
    run_id: str
    run_key: PeerId
    host: PeerId
    stage: StageIndex
    layout: ParameterLayout
    folder: Path
    """Where what comes lies until all of it is here."""
    amendments: int
    """Of the run, that are in the settings."""
    broken_off: BrokenOff = field(default_factory=BrokenOff)
    """It is gone on with, for as long as somebody gives that state and the results since: a home line takes longer for
    a state than members do to make the next, and whoever began anew with each would never end."""

    async def fetch(
        self,
        donors: Sequence[PeerId],
        members: Collection[PeerId],
        *,
        newer_than: int = -1,
        find: Find | None = None,
    ) -> tuple[StageState, StageChain]:
        """The state, and the chain of its version, which is above `newer_than`.

        `donors` are asked for chunks, members of that version's chain first and then the others in their order, and
        whom `find` names while they give them: it takes many minutes, and somebody was cut off when it began. As
        strangers say what they like, they come in any order but a fixed one. `members` are those whose word counts
        without the host.

        Raises TransientError when there is no such state, or nobody gives it, AmendedError when it is of a run with
        more amendments, DiskFullError or LocalError when the disk does not take it.
        """
        voters = set(members) - {self.transport.peer_id}
        newest = await self._choose(voters, newer_than)
        if newest.version <= newer_than:
            raise TransientError(f"version {newest.version} is {newest.reason}, and one above {newer_than} is wanted")
        chosen, holders = newest, dict[PeerId, Offer]()
        begun = self.broken_off.chosen
        if begun is not None and begun.version > newer_than and self._leads_to(begun, newest):
            chosen, holders = begun, await self._more_holders(donors, begun)
        if not holders:
            chosen, holders = newest, await self._more_holders(donors, newest)
        if not holders:
            raise TransientError(
                f"version {chosen.version} of stage {self.stage} is {chosen.reason}; no donor of {len(donors)} has it"
            )

        async def more(giving: Collection[PeerId], but: Collection[PeerId]) -> Iterable[PeerId]:
            try:
                known = await find() if find is not None else donors
            except TransientError as error:
                log.info("more donors of version %d: %s", chosen.version, error)
                known = donors
            found = await self._more_holders([donor for donor in known if donor not in but], chosen, giving)
            if not found and not giving:
                await self._check_is_not_replaced(chosen, voters, newer_than)
            return found

        offer = next(iter(holders.values()))  # the hashes are those under the digest, whoever sent them
        self.broken_off.go_on_with(chosen, offer)
        try:
            chunks = await fetch_chunks(
                self.transport, list(holders), offer, self.settings, self.folder, self.broken_off.chunks, more
            )
            self.broken_off.clear()
            state = await asyncio.to_thread(read_state, self.layout, chunks, chosen.digest, self.folder)
        except (RemoteError, TimeoutError) as error:
            why = str(error) or "not in time"
            raise TransientError(f"version {chosen.version} from {len(holders)} donors: {why}") from error
        if (state.version, state.name) != (chosen.version, chosen.chain.name):
            raise TransientError(f"the state that is {chosen.reason} is of {state.version}, not of {chosen.version}")
        log.info("version %d of stage %d: %s, %d donors", chosen.version, self.stage, chosen.reason, len(holders))
        return state, chosen.chain

    async def _check_is_not_replaced(self, chosen: ChosenState, voters: set[PeerId], newer_than: int) -> None:
        """Raises TransientError where those who say what is to be fetched are there, and say that it is another."""
        try:
            newest = await self._choose(voters, newer_than)
        except AmendedError:
            raise
        except TransientError as error:
            log.info("whether version %d is still to be had: %s", chosen.version, error)
            return
        if newest.digest != chosen.digest:
            raise TransientError(f"nobody gives version {chosen.version} any more; {newest.version} is {newest.reason}")

    def _leads_to(self, begun: ChosenState, newest: ChosenState) -> bool:
        """Whether members have the results from the one to the other: whoever has the older comes on by them."""
        behind = newest.version - begun.version
        return begun.chain.lineage == newest.chain.lineage and behind <= self.settings.retained_results

    async def _more_holders(
        self, donors: Iterable[PeerId], chosen: ChosenState, giving: Collection[PeerId] = ()
    ) -> dict[PeerId, Offer]:
        """Who of them gives that state beside those that are `giving` it. Of a certified member no stranger takes the
        place: there is one for it, too, where strangers hold all."""
        members = frozenset(chosen.chain.members)
        known = [donor for donor in donors if donor not in giving]
        certified = [donor for donor in known if donor in members]
        found = await self._first_holders(certified, chosen, MOST_DONORS - len(members & set(giving)))
        others = [donor for donor in known if donor not in members]
        return found | await self._first_holders(others, chosen, MOST_DONORS - len(giving) - len(found))

    async def _first_holders(self, donors: Sequence[PeerId], chosen: ChosenState, at_most: int) -> dict[PeerId, Offer]:
        """Those among the first of them; among the next where none of these has it, and so a few times."""
        for start in range(0, min(len(donors), ASKED_TIMES * at_most), max(1, at_most)):
            if holders := await self._holders(donors[start : start + at_most], chosen):
                return holders
        return {}

    async def _holders(self, donors: Iterable[PeerId], chosen: ChosenState) -> dict[PeerId, Offer]:
        """Who of them has that state."""
        offers = await self._offers(donors, int(chosen.version))
        holders = {donor: offer for donor, offer in offers.items() if offer.digest == chosen.digest}
        for donor in sorted(set(offers) - set(holders)):
            log.warning("%s states another digest of version %d than is %s", donor, chosen.version, chosen.reason)
        return holders

    async def _choose(self, members: set[PeerId], newer_than: int) -> ChosenState:
        try:
            anchor = await self._anchor()
            self._check_amendments(anchor.chain, self.host)
            return ChosenState(anchor.state_digest, anchor.chain, "anchored by the run key")
        except AmendedError:
            raise
        except (TransientError, RemoteError) as error:
            log.info("no anchor of stage %d: %s", self.stage, error)
        latest = await self._offers(sorted(members), None)
        for version in sorted({offer.version for offer in latest.values()}, reverse=True):
            if version <= newer_than:
                break
            # Members take their snapshots at slightly different times, and hold the one before.
            ahead = sorted(peer for peer, offer in latest.items() if offer.version > version)
            stated = {peer: offer for peer, offer in latest.items() if offer.version == version}
            chosen = agreed(members, stated | await self._offers(ahead, version))
            if chosen is not None:
                self._check_amendments(chosen.chain, min(stated))
                return chosen
        raise TransientError(
            f"no state of stage {self.stage} above version {newer_than} is stated by more than two thirds of its "
            f"{len(members)} members, {len(latest)} of which answered; the host does not say either"
        )

    def _check_amendments(self, chain: StageChain, told_by: PeerId) -> None:
        """Raises AmendedError if more are in force there, TransientError if fewer are."""
        if chain.amendments > self.amendments:
            raise AmendedError(told_by)
        if chain.amendments < self.amendments:
            raise TransientError(f"version {chain.version} is of before the run was amended")

    async def _anchor(self) -> Anchor:
        """The run key's last word on the stage."""
        request, call_s = Message({"stage": int(self.stage), "version": LATEST}), self.settings.deadlines.call_s
        reply = await self.transport.call(self.host, ANCHOR, request, timeout_s=call_s, max_body_bytes=0)
        anchor = Anchor.from_value(Fields("anchor answer", reply.meta).message("anchor"))
        anchor.check(run_id=self.run_id, run_key=self.run_key)
        if anchor.stage != self.stage:
            raise RemoteError("anchor", f"anchor of stage {anchor.stage}, not of {self.stage}", self.host)
        return anchor

    async def _offers(self, peers: Iterable[PeerId], version: int | None) -> dict[PeerId, Offer]:
        """What each of them says it holds, if it is well-formed and of this stage of this run; in their order."""

        async def ask(peer: PeerId) -> Offer | None:
            try:
                offer = await fetch_offer(self.transport, peer, self.stage, self.layout, self.settings, version=version)
            except (TransientError, RemoteError) as error:
                log.info("donor %s: %s", peer, error)
                return None
            chain = offer.chain
            is_ours = chain is not None and (chain.run_id, chain.stage, chain.run_key, chain.version) == (
                self.run_id,
                self.stage,
                self.run_key,
                offer.version,
            )
            return offer if is_ours else None

        asked = [peer for peer in peers if peer != self.transport.peer_id]
        found = await asyncio.gather(*(ask(peer) for peer in asked))
        return {peer: offer for peer, offer in zip(asked, found, strict=True) if offer is not None}
