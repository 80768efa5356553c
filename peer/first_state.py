"""This is where a joining peer gets its stage's state: the genesis's, its own from before, or that of who went on."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peer.donors import donors_of
from peer.host import HOST_RETRY_S, Host
from peer.joining_state import JoiningState
from peer.neighbours import stage_topic
from peer.way_back import state_to_go_on_from
from swarm.checkpoint.state import StageState
from swarm.checkpoint.transfer import fetch_state
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, RunId, StageIndex
from swarm.core.settings import RunSettings
from swarm.core.stage_chain import Genesis, StageChain
from swarm.host_protocol import GENESIS
from swarm.identity import verify
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Directory, Transport

log = logging.getLogger(__name__)

STATE_TRIES = 20
GENESIS_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class FirstState:
    """One peer's search for the state of one stage."""

    settings: RunSettings
    run_id: RunId
    run_key: PeerId
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
    rng: random.Random

    async def get(self) -> tuple[StageState, StageChain]:
        """The state and the certified facts: of its genesis for a founder, of a snapshot later.

        Waits for the run to begin. Raises RemoteError for a host that says what is not so, TransientError without one.
        """
        state: StageState | None = None
        while True:
            ready = state is not None
            wait_s = GENESIS_WAIT_S if ready else 0.0
            meta: dict[str, Value] = {"stage": int(self.stage), "ready": ready, "wait_s": wait_s}
            about = f"genesis {self.run_id} {self.stage}"
            answer = await self.host.answer(about, GENESIS, meta, timeout_s=GENESIS_WAIT_S + 10.0)
            fields = Fields("genesis answer", answer)
            if fields.optional("genesis"):
                genesis = Genesis.from_value(fields.message("genesis"))
                if not self._is_signed(genesis):
                    raise RemoteError("signature", "the genesis is not signed by the run key", self.host.peer_id)
                self.host.kept.keep(about, answer)
                chain = StageChain.begin(genesis, self.settings)
                beside = fields.items("beside", Genesis.from_value, max_items=2)
                self.on_begun([genesis, *(one for one in beside if self._is_signed(one))])
                if not (ready and self.me in chain.members):
                    # The stage began without this process: its present state is with the peers that went on.
                    with contextlib.suppress(TransientError):
                        return await self._present(chain)
                if state is None:
                    state = await self._initial()
                if state.version == genesis.version:  # nobody has gone on yet, or nobody is left
                    return replace(state, name=genesis.name), chain
                await asyncio.sleep(HOST_RETRY_S)
            elif state is None:
                state = await self._initial()

    def _is_signed(self, genesis: Genesis) -> bool:
        return genesis.run_id == self.run_id and verify(self.run_key, genesis.signed_bytes(), genesis.signature)

    async def _initial(self) -> StageState:
        for _ in range(STATE_TRIES):
            try:
                return (await fetch_state(self.transport, self.host.peer_id, self.stage, self.layout, self.settings))[0]
            except TransientError as error:
                log.info("initial state: %s", error)
                await asyncio.sleep(HOST_RETRY_S)
        raise TransientError(f"the host does not give the state of stage {self.stage}")

    async def _present(self, beginning: StageChain) -> tuple[StageState, StageChain]:
        """The stage's state by now, from whoever went on from its `beginning`. Raises TransientError."""
        topic = stage_topic(self.run_id, self.stage)
        donors = await donors_of(self.directory, self.transport, topic, self.rng)
        held = await state_to_go_on_from(self.kept, beginning, self.layout, self.settings, self.transport, donors)
        if held is not None:
            return held
        # Anybody can be in the directory of a public run: there, without an anchor, only certified members count.
        members = beginning.members if self.settings.trust == "public" else donors
        wanted = JoiningState(
            self.transport,
            self.settings,
            beginning.run_id,
            beginning.run_key,
            beginning.coordinator,
            beginning.stage,
            self.layout,
        )
        return await wanted.fetch(donors, members)
