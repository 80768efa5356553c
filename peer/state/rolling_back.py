"""How a peer hears that the run goes on from an earlier state, and goes there; or that it is amended.

The run key's word is a genesis of a later era: it names members, version and data, and the digest of the state, which
is that of an earlier version under the new one's number. Whoever keeps a snapshot of that earlier version has it on
disk; the others get it from the host. A peer that did not hear finds itself behind, as one that slept does.

To be amended an era ends at a version that the run key names ahead: nobody takes a step beyond. Under other settings a
peer is made anew: once it has heard that they are in force, it joins again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from peer.directory.host import Host
from peer.round.stage_steps import StageSteps
from peer.round.taking import StepTaking
from peer.state.continuing import Continuing, from_elsewhere
from peer.state.joining_state import BrokenOff, JoiningState
from swarm.checkpoint.state import StageState
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.host_protocol import ENDING, GENESIS, ROLLBACK
from swarm.identity.key import verify
from swarm.manifest.amendment import unpacked_changes
from swarm.manifest.signed_run import Ending
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

RETRY_S = 1.0
ASK_EVERY_S = 5.0
ENDED_ASK_EVERY_S = 0.5
"""Where the era has ended, to be amended."""


class RollingBack:
    """Takes the run key's geneses while the run goes on."""

    def __init__(
        self,
        steps: StageSteps,
        taking: StepTaking,
        host: Host,
        continuing: Continuing,
        on_geneses: Callable[[Sequence[Genesis]], None],
        end_at: Callable[[int], None],
    ) -> None:
        """`on_geneses` is told the stage's new genesis and those beside it, all of them signed by the run key; `end_at`
        has no step taken beyond a version."""
        self._steps = steps
        self._taking = taking
        self._host = host
        self._continuing = continuing
        self._on_geneses = on_geneses
        self._end_at = end_at
        self._newest: Genesis | None = None
        self._to_version = -1
        self._broken_off = BrokenOff()
        self._heard = asyncio.Event()
        self.amended = asyncio.Event()
        """More amendments are in force than this peer was made under."""
        self.ending: Ending | None = None
        """The newest word that the era is to end."""
        self._in_time = True
        """It came before that version was reached here."""

    def serve(self, transport: Transport) -> None:
        """Begin to listen."""
        transport.serve(ROLLBACK, self._on_rollback, max_body_bytes=0)
        transport.serve(ENDING, self._on_ending, max_body_bytes=0)

    async def _on_rollback(self, sender: PeerId, request: Message) -> Message:
        """Whoever brings the run key's word does not matter; an old word changes nothing."""
        fields = Fields("rollback call", request.meta)
        genesis, to_version = Genesis.from_value(fields.message("genesis")), fields.integer("to_version")
        beside = fields.items("beside", Genesis.from_value, max_items=2)
        fields.done()
        self._take(genesis, to_version, beside, sender)
        return Message()

    async def _on_ending(self, sender: PeerId, request: Message) -> Message:
        """Whoever brings the run key's word does not matter; of two the later end holds."""
        ending, chain = Ending.from_value(Fields("ending call", request.meta).message("ending")), self._steps.chain
        if ending.run_id != chain.run_id or not ending.is_signed_by(chain.run_key):
            raise RemoteError("signature", "the end of an era is not signed by the run key", sender)
        unpacked_changes(ending.changes)  # what people are told
        known = self.ending
        is_newer = known is None or (ending.era, ending.version) > (known.era, known.version)
        if ending.era == chain.era and is_newer:
            self.ending = ending
            # Only whoever knows it before takes a snapshot there.
            self._in_time = self._steps.version < ending.version
            self._end_at(int(ending.version))
            log.warning("this era ends at version %d: the run is to be amended", ending.version)
            self._heard.set()
        held = self._steps.context.snapshots.get(int(ending.version))
        digest = held.digest if held is not None and held.chain.era == ending.era else None
        in_time = self._in_time or digest is not None
        return Message({"in_time": in_time, "digest": digest})

    def _take(self, genesis: Genesis, to_version: int, beside: Sequence[Genesis], sender: PeerId) -> None:
        """The run key's word; an old one changes nothing. Raises RemoteError if it is none for this stage."""
        chain = self._steps.chain
        for one in (genesis, *beside):
            is_ours = (one.run_id, one.run_key, one.era) == (chain.run_id, chain.run_key, genesis.era)
            if not is_ours or not verify(chain.run_key, one.signed_bytes(), one.signature):
                raise RemoteError("signature", "the genesis of a rollback is not signed by the run key", sender)
        if genesis.stage != chain.stage:
            raise RemoteError("protocol", f"a rollback of stage {genesis.stage}, this is {chain.stage}", sender)
        newest = max(chain.era, self._newest.era if self._newest is not None else 0)
        if genesis.amendments > chain.amendments:
            self.amended.set()
        elif genesis.era > newest:
            self._newest, self._to_version = genesis, to_version
            self._on_geneses([genesis, *beside])
            self._heard.set()
        elif genesis.era == newest:
            # Only the geneses are signed: whoever told them first may have kept some back, or named another version.
            self._on_geneses([genesis, *beside])
            if sender == self._host.peer_id:
                self._to_version = to_version

    async def _ask(self) -> None:
        """Where no step is taken the stages may have begun again, or be about to, and nobody could tell this peer."""
        steps, known = self._steps, self._steps.chain.amendments
        meta: dict[str, Value] = {
            "stage": int(steps.chain.stage),
            "ready": False,
            "wait_s": 0.0,
            "amendments": known,
        }
        try:
            reply = await self._host.call(GENESIS, meta, timeout_s=steps.context.settings.deadlines.call_s)
            fields = Fields("genesis answer", reply.meta)
            if fields.integer("amendments") > known:
                self.amended.set()
            if not fields.optional("genesis"):
                return
            genesis = Genesis.from_value(fields.message("genesis"))
            beside = fields.items("beside", Genesis.from_value, max_items=2)
            self._take(genesis, fields.integer("to_version"), beside, self._host.peer_id)
        except (TransientError, RemoteError) as error:
            log.debug("whether the stages began again: %s", error)

    async def run(self) -> None:
        """Go where the run key says, for ever."""
        version = self._steps.version
        while True:
            steps = self._steps
            is_awaited = steps.is_over and (self.ending is not None or not steps.is_run_over)
            if not await happened(self._heard, within_s=ENDED_ASK_EVERY_S if is_awaited else ASK_EVERY_S):
                if version == steps.version:
                    await self._ask()
                version = steps.version
                continue
            self._heard.clear()
            genesis = self._newest
            if genesis is None or genesis.era <= steps.era:
                continue
            try:
                state = await self._state_of(genesis, self._to_version)
            except (TransientError, RemoteError, TimeoutError) as error:
                log.info("the state to go on from: %s", error)
                await asyncio.sleep(RETRY_S)
                if genesis.era > self._steps.era:  # it may have come from a peer meanwhile
                    self._heard.set()
                continue
            if genesis.era > self._steps.era:
                await self._go_to(genesis, state)

    async def _state_of(self, genesis: Genesis, to_version: int) -> StageState:
        """The state that the genesis names. Raises TransientError or RemoteError."""
        state = await self._continuing.state_of(genesis, to_version)
        if state is not None:
            return state
        steps, own = self._steps, self._steps.chain
        wanted = JoiningState(
            steps.context.transport,
            steps.context.settings,
            own.run_id,
            own.run_key,
            self._host.peer_id,
            own.stage,
            steps.replica.layout,
            steps.context.snapshots.folder,
            own.amendments,
            self._broken_off,
        )
        return await from_elsewhere(genesis, wanted)

    async def _go_to(self, genesis: Genesis, state: StageState) -> None:
        steps = self._steps
        chain, before = StageChain.begin(genesis, steps.context.settings), steps.version
        named = replace(state, name=genesis.name)
        await self._taking.begin_again(named, chain)
        log.warning(
            "the run goes on from version %d as version %d; %d was here", self._to_version, chain.version, before
        )
        await steps.context.snapshots.save(named, chain)  # steps change neither its weights nor its moments
        await asyncio.to_thread(steps.context.results.forget_others)
