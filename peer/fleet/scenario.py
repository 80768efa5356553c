"""A scenario: the fleet, its links, its sessions and what befalls it, read from a TOML file."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from peer.fleet.sessions import Law, Sessions
from peer.fleet.window_scenario import WindowScenario
from swarm.core.directory.rebalancing import RebalancingSettings
from swarm.core.errors import SettingsError
from swarm.core.tables import Bounds, Table, read_table

Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, most=1)]
Whole = Annotated[int, Bounds(least=0)]
Count = Annotated[int, Bounds(least=1)]


@dataclass(frozen=True, kw_only=True)
class ModelPart(Table):
    """What one microbatch, one round and one joiner cost."""

    stages: Annotated[int, Bounds(least=2, most=64)]
    stage_costs: tuple[Positive, ...] = ()
    """Of each stage, relative to the others; all alike if left out."""
    microbatch_compute_s: Positive
    """Forward and backward of one microbatch in all stages together, on a peer of power 1."""
    forward_share: Share = 1 / 3
    activation_mbytes: Positive
    """Of one microbatch between two stages; its gradient is as large."""
    state_mbytes: Positive
    """Weights and moments of a stage: what a joiner downloads."""
    round_mbytes: Positive
    """What a member uploads in an averaging round."""
    step_s: Positive
    """The target batch is what the first fleet would do in this time, perfectly balanced."""
    microbatches: Count | None = None
    """Of a step's target batch, if it is not to follow from `step_s`. At twice `step_s` a step is cut short even so."""
    straggler_s: Positive | None = None
    """What is under way when all of a step has been granted has so long to come home (the manifest's
    `deadlines.straggler_s`); half as long again as microbatches take if left out."""
    delay: Literal[0, 1] = 1
    """0: sources wait for the round. 1: the next step begins while the round runs."""
    round_s: NotNegative = 0.0
    """What a round takes beside its bytes and five round trips: votes written to disk, encoding, the optimizer."""


@dataclass(frozen=True, kw_only=True)
class FleetPart(Table):
    """Peers and their links."""

    peers: Annotated[int, Bounds(least=2, most=100_000)]
    first_stages: tuple[int, ...] = ()
    """Peers of each stage at the start; even if left out."""
    power_spread: Annotated[float, Bounds(least=0, most=2)] = 0.4
    """Standard deviation of the logarithm of peers' power, whose median is 1."""
    powers: tuple[Positive, ...] = ()
    """Of each peer at the start, those of stage 0 first with `first_stages`, if they are not to be drawn."""
    up_mbit: Positive
    down_mbit: Positive
    link_use: Share = 0.9
    """Share of a link that gets used when it is the limit."""
    round_trip_ms: NotNegative
    loss: Annotated[float, Bounds(least=0, most=0.5)] = 0.0
    """Share of packets lost."""
    fanout: Annotated[int, Bounds(least=1, most=64)] = 8
    """Peers of the next stage that one peer knows and chooses from; all of them in a fleet no larger than this."""
    pipeline_fill: Positive = 2.5
    """Microbatches in flight, as a multiple of what would fill an idle pipeline."""
    max_in_flight: Count | None = None
    """Microbatches that each source has in flight, if that is not to follow from `pipeline_fill`."""
    start_s: NotNegative = 0.0
    """From a joiner's start until it has been admitted and given a stage."""
    notice_s: NotNegative = 0.0
    """From a crash until those beside the lost peer act on it; the end of its streams tells them."""


@dataclass(frozen=True, kw_only=True)
class SessionPart(Table):
    """How long peers stay and how they go. As many come as go."""

    law: Law
    shape: Positive = 0.5
    turnover: Share
    """Share of the fleet that is replaced every `turnover_s`."""
    turnover_s: Positive = 600.0
    warned: Share = 0.5
    """Share of departures in which the daemon is told and can drain; the others are crashes."""
    drain_s: NotNegative = 30.0


@dataclass(frozen=True, kw_only=True)
class TrustPart(Table):
    """What verification costs, and whom it is for."""

    audits: Share = 0.15
    """Of its compute that a member spends on auditing others."""
    probation_replays: Whole = 10
    """Microbatches of its stage that a newcomer replays before it may become a member."""
    admitted_share: Share = 0.125
    """Of a stage's members, that many newcomers may join with each version."""
    liars: Share = 0.0
    """Of joiners, that lie about all they compute."""


@dataclass(frozen=True, kw_only=True)
class RunPart(Table):
    """How long to simulate, and how the swarm decides."""

    seed: int = 0
    warm_up_s: NotNegative = 1200.0
    """Before measuring: the pipeline fills, and newcomers and members find their ratio."""
    measured_s: Positive = 3600.0
    lease_s: Positive = 15.0
    decide_s: Positive = 30.0
    """Time between two looks at who should move."""
    min_replicas: Count = 2
    payback_s: Positive = 1200.0
    power_noise: Share = 0.1
    """Relative error of one peer's measured power."""


@dataclass(frozen=True, kw_only=True)
class Event(Table):
    """Something that befalls the fleet, at a time measured from the end of the warm-up."""

    kind: Literal["outage", "crowd", "stage_loss", "crash"]
    at_s: NotNegative
    share: Share = 0.0
    """outage: of the fleet, gone without a word at once. crowd: as many come, compared with the fleet."""
    lasts_s: NotNegative = 0.0
    """outage: then they are back. crowd: they come within this time."""
    stage: Whole = 0
    leaves: Whole = 1
    """stage_loss: replicas of `stage` that are left; all others crash at once. crash: one member of `stage` does."""
    power: Positive | None = None
    """crash: of a member that has this power; None: of any."""
    replaced_after_s: NotNegative | None = None
    """crash: then a machine of the same power is started; None: nobody comes instead."""


@dataclass(frozen=True, kw_only=True)
class Scenario(Table):
    """Everything a simulation depends on."""

    name: str
    about: str = ""
    run: RunPart = field(default_factory=RunPart)
    model: ModelPart
    fleet: FleetPart
    sessions: SessionPart
    trust: TrustPart = field(default_factory=TrustPart)
    events: tuple[Event, ...] = ()

    def disagreement(self, given: Collection[str]) -> str | None:
        stages = self.model.stages
        if self.model.stage_costs and len(self.model.stage_costs) != stages:
            return f"model.stage_costs has {len(self.model.stage_costs)} costs for {stages} stages"
        first = self.fleet.first_stages
        if first and (len(first) != stages or sum(first) != self.fleet.peers or min(first) < 1):
            return (
                f"fleet.first_stages = {list(first)} must be {stages} numbers of 1 or more that add up to "
                f"fleet.peers = {self.fleet.peers}"
            )
        if self.fleet.powers and len(self.fleet.powers) != self.fleet.peers:
            return f"fleet.powers has {len(self.fleet.powers)} powers for fleet.peers = {self.fleet.peers}"
        if self.fleet.peers < stages:
            return f"fleet.peers = {self.fleet.peers} is less than one for each of {stages} stages"
        for number, event in enumerate(self.events):
            if event.stage >= stages:
                return f"events[{number}].stage = {event.stage} is not below model.stages = {stages}"
            if event.at_s >= self.run.measured_s:
                return f"events[{number}].at_s = {event.at_s:g} is not below run.measured_s = {self.run.measured_s:g}"
        return None

    @property
    def costs(self) -> tuple[float, ...]:
        """Work of each stage for one microbatch: seconds of a peer of power 1."""
        relative = self.model.stage_costs or (1.0,) * self.model.stages
        return tuple(self.model.microbatch_compute_s * cost / sum(relative) for cost in relative)

    @property
    def law(self) -> Sessions | None:
        """None if nobody leaves."""
        part = self.sessions
        return Sessions(part.law, part.turnover_s / part.turnover, part.shape) if part.turnover else None

    @property
    def rebalancing(self) -> RebalancingSettings:
        run = self.run
        return RebalancingSettings(min_replicas=run.min_replicas, power_noise=run.power_noise, payback_s=run.payback_s)


def read_scenario(path: Path) -> Scenario | WindowScenario:
    """One with a table [windows] is of whole models.

    Raises SettingsError that names the field, its value and the remedy.
    """
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror}); give a scenario's path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    try:
        return read_table(WindowScenario, value) if "windows" in value else read_table(Scenario, value)
    except SettingsError as error:
        raise SettingsError(f"{path}:\n{error}") from error
