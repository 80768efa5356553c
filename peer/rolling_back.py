"""This is where a peer hears that the run goes on from an earlier state, and goes there.

The run key's word is a genesis of a later era: it names members, version and data, and the digest of the state, which
is that of an earlier version under the new one's number. Whoever keeps a snapshot of that earlier version has it on
disk; the others get it from the host. A peer that did not hear finds itself behind, as one that slept does.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from peer.rounds import StageRounds
from peer.snapshots import Snapshot
from swarm.checkpoint.state import StageState, state_digest, state_from_chunks
from swarm.checkpoint.transfer import fetch_state
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.stage_chain import Genesis, StageChain
from swarm.host_protocol import ROLLBACK
from swarm.identity import verify
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

RETRY_S = 1.0


class RollingBack:
    """Takes the run key's geneses while the run goes on."""

    def __init__(
        self,
        rounds: StageRounds,
        coordinator: PeerId,
        on_geneses: Callable[[Sequence[Genesis]], None],
    ) -> None:
        """`on_geneses` is told the stage's new genesis and those beside it, all of them signed by the run key."""
        self._rounds = rounds
        self._coordinator = coordinator
        self._on_geneses = on_geneses
        self._newest: Genesis | None = None
        self._to_version = -1
        self._heard = asyncio.Event()

    def serve(self, transport: Transport) -> None:
        """Begin to listen."""
        transport.serve(ROLLBACK, self._on_rollback, max_body_bytes=0)

    async def _on_rollback(self, sender: PeerId, request: Message) -> Message:
        """Whoever brings the run key's word does not matter; an old word changes nothing."""
        fields = Fields("rollback call", request.meta)
        genesis, to_version = Genesis.from_value(fields.message("genesis")), fields.integer("to_version")
        beside = fields.items("beside", Genesis.from_value, max_items=2)
        fields.done()
        chain = self._rounds.chain
        for one in (genesis, *beside):
            is_ours = (one.run_id, one.run_key, one.era) == (chain.run_id, chain.run_key, genesis.era)
            if not is_ours or not verify(chain.run_key, one.signed_bytes(), one.signature):
                raise RemoteError("signature", "the genesis of a rollback is not signed by the run key", sender)
        if genesis.stage != chain.stage:
            raise RemoteError("protocol", f"a rollback of stage {genesis.stage}, this is {chain.stage}", sender)
        if genesis.era > max(chain.era, self._newest.era if self._newest is not None else 0):
            self._newest, self._to_version = genesis, to_version
            self._on_geneses([genesis, *beside])
            self._heard.set()
        return Message()

    async def run(self) -> None:
        """Go where the run key says, for ever."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            genesis = self._newest
            assert genesis is not None
            try:
                state = await self._state_of(genesis, self._to_version)
            except (TransientError, RemoteError, TimeoutError) as error:
                log.info("the state to go on from: %s", error)
                await asyncio.sleep(RETRY_S)
                if genesis.era > self._rounds.era:  # it may have come from a peer meanwhile
                    self._heard.set()
                continue
            if genesis.era > self._rounds.era:
                await self._go_to(genesis, state)

    async def _state_of(self, genesis: Genesis, to_version: int) -> StageState:
        """The state that the genesis names. Raises TransientError or RemoteError."""
        rounds = self._rounds
        snapshot = rounds.snapshots.get(to_version)
        if snapshot is not None:
            state = await asyncio.to_thread(self._kept, genesis, snapshot)
            if state is not None:
                return state
        layout, settings = rounds.replica.layout, rounds.settings
        state, offer = await fetch_state(rounds.transport, self._coordinator, int(genesis.stage), layout, settings)
        if (offer.digest, state.version) != (genesis.state_digest, genesis.version):
            raise TransientError(f"the host gives version {state.version}, not the one it has signed for")
        return state

    def _kept(self, genesis: Genesis, snapshot: Snapshot) -> StageState | None:
        """The state from disk; None if it is another than the genesis names."""
        chunks = [snapshot.chunk(index) for index in range(len(snapshot.hashes))]
        kept = state_from_chunks(self._rounds.replica.layout, chunks, snapshot.digest)
        state = replace(kept, version=int(genesis.version))
        return state if state_digest(state) == genesis.state_digest else None

    async def _go_to(self, genesis: Genesis, state: StageState) -> None:
        rounds = self._rounds
        chain, before = StageChain.begin(genesis, rounds.settings), rounds.version
        named = replace(state, name=genesis.name)
        await rounds.begin_again(named, chain)
        log.warning("rolled back from version %d: on from %d as version %d", before, self._to_version, chain.version)
        await rounds.snapshots.save(named, chain)  # steps change neither its weights nor its moments
