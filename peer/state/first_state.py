"""How a joining peer gets its stage's state: the genesis's, its own from before, or that of who went on.

Where nobody who went on is there any more it waits, and shows the host what it holds: the run goes on from the newest
state that all stages can reach together.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kernels.threads import Threads
from peer.directory.host import HOST_RETRY_S, Host
from peer.directory.neighbours import stage_topic
from peer.state.continuing import Continuing, from_elsewhere
from peer.state.donors import donors_of
from peer.state.joining_state import BrokenOff, JoiningState
from peer.state.way_back import state_to_go_on_from
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.state import StageState, state_digest
from swarm.checkpoint.transfer import fetch_offer, fetch_state
from swarm.core.canonical import Value
from swarm.core.errors import AmendedError, DiskFullError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, RunId, StageIndex
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.host_protocol import GENESIS
from swarm.identity.key import verify
from swarm.log_format import printable
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Directory, Transport

log = logging.getLogger(__name__)

STATE_TRIES = 20
GENESIS_WAIT_S, LOOK_AGAIN_S = 5.0, 1.0
"""At the host: for the run to begin; and between two looks for somebody of a stage that has begun."""
MAX_WAITS_FOR = 400
HOST_IS_AWAY = "the host does not answer, and nobody of this stage is there; it goes on by itself when they are back"


@dataclass(frozen=True, kw_only=True)
class FirstState:
    """One peer's search for the state of one stage."""

    settings: RunSettings
    run_id: RunId
    run_key: PeerId
    amendments: int
    """Of the run, that are in the settings."""
    stage: StageIndex
    layout: ParameterLayout
    me: PeerId
    host: Host
    transport: Transport
    directory: Directory
    kept: Path
    """Where this peer kept states of the stage before."""
    on_begun: Callable[[Sequence[Genesis]], None]
    """Told of the geneses of this stage and those beside it."""
    threads: Threads
    """That share the steps to be taken again."""
    say: Callable[[str], None]
    """Told in words what is waited for, whenever that changes."""
    rng: random.Random
    broken_off: BrokenOff = field(default_factory=BrokenOff)

    async def get(self) -> tuple[StageState, StageChain]:
        """The state and the certified facts: of its genesis for a founder, of a snapshot later.

        Waits for the run to begin, or for enough of those who were there to come back. Raises RemoteError for a host
        that says what is not so, TransientError without one, AmendedError if the run has other settings by now,
        DiskFullError where the disk does not take the state.
        """
        past = KeptPast(self.kept, self.stage, self.settings, self.layout, self.threads)
        continuing = Continuing(past, self.host.peer_id)
        continuing.serve(self.transport)
        initial: StageState | None = None
        found_nobody = has_begun = False
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            fields = await self._asked(ready=found_nobody, has_begun=has_begun)
            self.say(printable(fields.text("waits_for", max_length=MAX_WAITS_FOR)))
            if not fields.optional("genesis"):
                if found_nobody and loop.time() < asked_at + HOST_RETRY_S:
                    await asyncio.sleep(HOST_RETRY_S)  # the host was to wait, and did not
                initial, found_nobody = initial or await self._initial(continuing), True
                continue
            genesis, to_version = Genesis.from_value(fields.message("genesis")), fields.integer("to_version")
            chain = StageChain.begin(genesis, self.settings)
            has_begun, was_here = True, await asyncio.to_thread(past.newest, chain.lineage) >= 0
            if self.me in genesis.members and fields.boolean("begins") and not was_here:
                try:
                    state = await self._beginning(genesis, to_version, continuing, initial)
                    return replace(state, name=genesis.name), chain
                except (AmendedError, DiskFullError):
                    raise
                except (TransientError, RemoteError, TimeoutError) as error:  # the run may begin again elsewhere
                    log.info("the state that the stage begins from: %s", error)
            # The stage began without this process: its present state is with the peers that went on.
            try:
                if not fields.boolean("is_lost"):  # newcomers that are left there are nobody to go on with
                    return await self._present(chain, past)
            except (AmendedError, DiskFullError):
                raise
            except TransientError as error:
                log.info("the present state: %s", error)
            if found_nobody:
                await asyncio.sleep(HOST_RETRY_S)
            found_nobody = True

    async def _asked(self, *, ready: bool, has_begun: bool) -> Fields:
        """What the host says of where the stage begins, as it has checked to be the run key's word."""
        wait_s = (LOOK_AGAIN_S if has_begun else GENESIS_WAIT_S) if ready else 0.0
        known = self.amendments
        meta: dict[str, Value] = {"stage": int(self.stage), "ready": ready, "wait_s": wait_s, "amendments": known}
        about = f"genesis {self.run_id} {self.stage} {known}"
        answer = await self.host.answer(about, GENESIS, meta, timeout_s=GENESIS_WAIT_S + 10.0)
        fields = Fields("genesis answer", answer)
        if fields.integer("amendments") > known:
            raise AmendedError(self.host.peer_id)
        if fields.optional("genesis"):
            genesis = Genesis.from_value(fields.message("genesis"))
            if not self._is_signed(genesis) or genesis.amendments != known:
                raise RemoteError("signature", "the genesis is not signed by the run key", self.host.peer_id)
            # That nobody has gone on is true at this moment only.
            self.host.kept.keep(about, {**answer, "begins": False, "is_lost": False, "waits_for": HOST_IS_AWAY})
            beside = fields.items("beside", Genesis.from_value, max_items=2)
            self.on_begun([genesis, *(one for one in beside if self._is_signed(one))])
        return fields

    async def _beginning(
        self, genesis: Genesis, to_version: int, continuing: Continuing, initial: StageState | None
    ) -> StageState:
        """The state that the genesis names: from here, or from the host. Raises TransientError, RemoteError,
        TimeoutError."""
        if initial is not None and await asyncio.to_thread(state_digest, initial) == genesis.state_digest:
            return initial
        state = await continuing.state_of(genesis, to_version)
        return state if state is not None else await from_elsewhere(genesis, self._wanted(genesis))

    def _is_signed(self, genesis: Genesis) -> bool:
        return genesis.run_id == self.run_id and verify(self.run_key, genesis.signed_bytes(), genesis.signature)

    async def _initial(self, continuing: Continuing) -> StageState:
        """What the stage is to begin from: of this machine, where an amended run goes on from it, or of the host."""
        for _ in range(STATE_TRIES):
            try:
                offer = await fetch_offer(self.transport, self.host.peer_id, self.stage, self.layout, self.settings)
                held = await continuing.state_with(offer.digest, offer.version, as_version=offer.version)
                if held is not None:
                    return held
                state, _ = await fetch_state(
                    self.transport,
                    self.host.peer_id,
                    self.stage,
                    self.layout,
                    self.settings,
                    self.kept,
                    held=self.broken_off.chunks,
                )
                self.broken_off.clear()
                return state
            except DiskFullError:
                raise
            except (TransientError, RemoteError, TimeoutError) as error:  # the host may have begun from another one
                log.info("initial state: %s", error)
                await asyncio.sleep(HOST_RETRY_S)
        raise TransientError(f"the host does not give the state of stage {self.stage}")

    async def _present(self, beginning: StageChain, past: KeptPast) -> tuple[StageState, StageChain]:
        """The stage's state by now, from whoever went on from its `beginning`. Raises TransientError."""
        topic = stage_topic(self.run_id, self.stage)
        find = partial(donors_of, self.directory, self.transport, topic, self.rng)
        donors = await find()
        held = await state_to_go_on_from(past, beginning, self.transport, donors)
        if held is not None:
            return held
        # Anybody can be in the directory of a public run: there, without an anchor, only certified members count.
        members = beginning.members if self.settings.trust == "public" else donors
        return await self._wanted(beginning).fetch(donors, members, find=find)

    def _wanted(self, begun: Genesis | StageChain) -> JoiningState:
        return JoiningState(
            self.transport,
            self.settings,
            begun.run_id,
            begun.run_key,
            begun.host,
            begun.stage,
            self.layout,
            self.kept,
            self.amendments,
            broken_off=self.broken_off,
        )
