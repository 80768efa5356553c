"""A stage's steps as one of its peers holds them: which version it is at, and the steps that are open.

The parts of the round read it; what changes it are the methods here, so that it agrees with itself between any two.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from peer.pipeline.compute import Urgency
from peer.pipeline.grants import StepGrants
from peer.round.step_state import StepState
from peer.stage.context import StageContext
from peer.state.replica import NewVersion, StageReplica
from swarm.checkpoint.state import StageState
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.round.step_progress import StepProgress, WindowProgress
from swarm.core.state.stage_chain import StageChain
from swarm.model.stage import Weights
from swarm.network.loop import happened

STEPS_LOOKED_AT = 8
"""The last ones say how long a step usually takes."""


class StageSteps:
    """The state of a peer's steps at one stage, on the event loop. What waits for a version waits here."""

    def __init__(
        self, context: StageContext, replica: StageReplica, chain: StageChain, may_join: Callable[[PeerId], bool]
    ) -> None:
        """`may_join`: whether a peer may be a member, by the run key's word: not while it is on probation."""
        self.context = context
        self.may_join = may_join
        self.replica = replica
        """The weights and sums: at the chain's version, and of its era."""
        self.chain = chain
        """What is certified of the stage up to its present version; only ever replaced whole."""
        self.open: dict[Step, StepState] = {}
        """The present version's step and, with a delay, the one after it: none earlier, and none once the run is over.
        The first has facts, which begin from `chain`, and a round if this peer is a member."""
        self.joining: set[PeerId] = set()
        """Who asks to be on the next roster: none of them is a member, and no more than a stage may have."""
        self._joins_at: Version | None = None
        """The version with which the leader says that the rosters make this peer a member; None before it has."""
        self._ends_at = context.settings.optimizer.total_steps
        """No step is taken beyond this version: the run's last, or the one at which it is to be amended."""
        self._is_turning = False
        """A version takes another's place: the fields agree again once it is announced."""
        self._turned = asyncio.Event()
        """Set when another version has taken its place and its steps are open, and replaced."""
        self.turned_at = time.monotonic()
        """When the present version took its place."""
        self._took_s: deque[float] = deque(maxlen=STEPS_LOOKED_AT)
        """Between the last versions."""
        self.validate()

    def validate(self) -> None:
        """Raises AssertionError, with the numbers, if the fields contradict each other."""
        chain, replica = self.chain, self.replica
        if self._is_turning:
            return
        at = f"stage {chain.stage} at version {chain.version}"
        assert replica.stage == chain.stage, f"{at}: weights of stage {replica.stage}"
        assert replica.version == chain.version, f"{at}: weights of version {replica.version}"
        assert replica.era == chain.era, f"{at}: weights of era {replica.era}, not {chain.era}"
        assert not self.joining & set(chain.members), f"{at}: members ask to become members"
        allowed = self._to_be_open()
        for step, state in self.open.items():
            assert step in allowed, f"{at}: step {step} is open, only {list(allowed)} may be"
            assert step == state.step, f"{at}: the state of step {state.step} is kept as that of {step}"
            if state.facts is not None:
                assert state.facts.previous_name == chain.name, f"{at}: step {step} begins from another version"
            assert state.round is None or self.is_member, f"{at}: a round of a peer that is no member"
            state.validate()

    # -- where the stage is -------------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        return self.chain.version

    @property
    def era(self) -> int:
        """Of the run."""
        return self.chain.era

    @property
    def is_member(self) -> bool:
        return self.context.me in self.chain.members

    @property
    def is_over(self) -> bool:
        """Whether no step is taken any more: the run is over, or waits to be amended."""
        return self.chain.version >= self._ends_at

    @property
    def is_run_over(self) -> bool:
        """Whether the run has taken its last step."""
        return self.chain.version >= self.context.settings.optimizer.total_steps

    @property
    def ends_at(self) -> int:
        """The version at which this era ends."""
        return self._ends_at

    @property
    def usual_s(self) -> float | None:
        """From one version to the next, lately; None while this peer has seen none made."""
        return statistics.median(self._took_s) if self._took_s else None

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        """Whether the stage reached `version` within the time."""
        give_up_at = time.monotonic() + timeout_s
        while self.chain.version < version:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return False
            await happened(self._turned, within_s=left_s)
        return True

    async def turned(self, *, within_s: float) -> None:
        """Until the stage is at another version, or the time is up."""
        await happened(self._turned, within_s=within_s)

    def evaluation_weights(self, version: int) -> Weights | None:
        """Weights of the current version or of a snapshot on disk."""
        if version == self.replica.version:
            return self.replica.weights
        snapshot = self.context.snapshots.get(version)
        return self.replica.model.weights(snapshot.weights()) if snapshot is not None else None

    def leased(self) -> list[MicrobatchId]:
        """The ids that this member may start, in order; none while it is none."""
        return self.chain.leases.ids_of(self.context.me) if self.is_member and not self.is_over else []

    def check_stage(self, sender: PeerId, stage: int) -> None:
        """Raises RemoteError for what is meant for a stage that this peer has left."""
        is_stopped = self.context.tasks.is_stopped
        if is_stopped or stage != self.chain.stage:
            now = "has left it" if is_stopped else f"serves stage {self.chain.stage}"
            raise RemoteError("protocol", f"a message to stage {stage}: this peer {now}", sender)

    # -- its open steps -----------------------------------------------------------------------------------

    def open_step(self, step: Step) -> StepState | None:
        """The step, while it is open here."""
        return self.open.get(step)

    def is_open(self, state: StepState) -> bool:
        """Whether it is not over, and no other has taken its number since the stage began again."""
        return self.open.get(state.step) is state

    async def step_state(self, step: Step, *, with_round: bool = False) -> StepState:
        """The open step, waiting for this peer to reach it. Raises TransientError if it does not in time."""
        give_up_at = time.monotonic() + self.context.settings.deadlines.call_s / 2
        while True:
            state = self.open.get(step)
            if state is not None and (state.round is not None or not with_round):
                return state
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or int(step) < self.chain.version or self.is_over:
                raise TransientError(f"step {step} is not open here: version {self.chain.version}")
            await happened(self._turned, within_s=left_s)

    def work_done(self, step: Step) -> None:
        """The step's sum has grown."""
        state = self.open.get(step)
        if state is not None:
            state.dirty.set()

    def owes_work(self) -> bool:
        """Whether an open step holds work of this peer that the other members' rounds will still take."""
        others = len(self.chain.members) > 1 and self.is_member
        return others and any(self.replica.num_done(step) for step in self.open)

    # -- who joins ----------------------------------------------------------------------------------------

    def joins_at(self, version: Version) -> None:
        """The leader says that the rosters make this peer a member with that version."""
        if self._joins_at is None or self._joins_at <= self.version:  # the first word holds until its time has come
            self._joins_at = version

    def may_work_for(self, step: Step) -> bool:
        """Whether what this peer computes for the step can count: it is a member, or will be by the time of its round.

        The next step's microbatches come while this one's round still runs, which names whom it lets in. If it does not
        name this peer, the work is lost, and nothing more.
        """
        if self.is_member:
            return True
        joins_at = self._joins_at
        return joins_at is not None and self.version < joins_at <= int(step) and self.may_join(self.context.me)

    def asks_to_join(self, peer: PeerId) -> None:
        """It is put on the next roster, if this peer or whoever hears of it leads."""
        if peer not in self.chain.members:
            self.joining.add(peer)

    def asks_no_more(self, peer: PeerId) -> None:
        """It does not answer."""
        self.joining.discard(peer)

    def next_to_join(self) -> Version:
        """The version with which whoever asks now becomes a member: a round that is closing names nobody more."""
        state = self.open.get(Step(self.chain.version))
        is_closing = state is not None and state.round is not None and state.round.is_closing
        return Version(self.chain.version + 1 + is_closing)

    # -- the era's end ------------------------------------------------------------------------------------

    def end_at(self, version: int) -> list[StepState]:
        """Take no step beyond this version; one that is named later in the same era may be higher.

        The steps that were open beyond it and are open no more: whoever waits for them hears it.
        """
        self._ends_at = min(version, self.context.settings.optimizer.total_steps)
        return self._closed([step for step in self.open if int(step) >= self._ends_at])

    # -- on -----------------------------------------------------------------------------------------------

    def turn(self, new: NewVersion, chain: StageChain) -> None:
        """The next version is the stage's from now on."""
        self._is_turning = True
        self.replica.swap(new)
        self.chain = chain
        now = time.monotonic()
        self._took_s.append(now - self.turned_at)
        self.turned_at = now
        self.joining -= set(chain.members)

    async def turn_back(self, state: StageState, chain: StageChain) -> None:
        """This state is the stage's from now on, whatever the version was here; what is in flight is left."""
        self._is_turning = True
        await self.context.compute.run(Urgency.ROUND, lambda: self.replica.restore(state, era=chain.era))
        if chain.era != self.chain.era:
            self._ends_at = self.context.settings.optimizer.total_steps
        self.chain, self.turned_at = chain, time.monotonic()
        self.joining -= set(chain.members)
        for one in self.open.values():
            one.dirty.set()
        self.open.clear()

    def close_those_over(self) -> list[StepState]:
        """The open steps that the stage is beyond: they are open no more, and whoever waits for them hears it."""
        return self._closed([step for step in self.open if int(step) < self.chain.version])

    def open_those_due(self) -> list[StepState]:
        """Those that are to be open and were not, as new ones."""
        made = [self._new_step(step) for step in self._to_be_open() if step not in self.open]
        self.open |= {state.step: state for state in made}
        return made

    def announce_version(self) -> None:
        """Wake whoever waits for one: its steps are open."""
        self._is_turning = False
        self._turned.set()
        self._turned = asyncio.Event()
        self.validate()

    def _closed(self, steps: Sequence[Step]) -> list[StepState]:
        over = [self.open.pop(step) for step in steps]
        for state in over:
            state.dirty.set()
            state.notify()
        return over

    def _to_be_open(self) -> list[Step]:
        if self.is_over:
            return []
        settings, version = self.context.settings, self.chain.version
        newest = version + (1 if settings.delay_at(version + 1) else 0)
        return [Step(number) for number in range(version, min(newest, self._ends_at - 1) + 1)]

    def _new_step(self, step: Step) -> StepState:
        settings = self.context.settings
        deadlines = settings.deadlines
        progress: StepProgress | WindowProgress
        if settings.has_windows:
            each = settings.microbatches_of_one
            progress = WindowProgress(step, each, deadlines.step_s, deadlines.straggler_s)
            return StepState(step, self.chain.leaders(step), progress, StepGrants(step))
        model, shares = self.replica.model, self.chain.shares(settings)
        progress = StepProgress(
            step,
            model.is_first,
            settings.microbatches_per_step,
            deadlines.step_s,
            deadlines.straggler_s,
            is_last=model.is_last,
            most_of=shares.of if shares is not None else None,
            allowances=self.chain.allowances(settings),
        )
        return StepState(step, self.chain.leaders(step), progress, StepGrants(step))
