"""A scenario of whole models in windows of local steps: the fleet, its lines, its sessions, read from a TOML file."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from peer.fleet.sessions import Law, Sessions
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.settings import (
    AveragingCodecName,
    AveragingSettings,
    CheckpointSettings,
    CodecSettings,
    TrainingSettings,
)
from swarm.core.tables import Bounds, Table

Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, most=1)]
Count = Annotated[int, Bounds(least=1)]


@dataclass(frozen=True, kw_only=True)
class WindowPart(Table):
    """What a window, a round and a joiner cost."""

    parameters: Count
    local_steps: Annotated[int, Bounds(least=2, most=1024)]
    window_s: Positive
    """That a machine of power 1 computes in a window."""
    averaging: AveragingCodecName = "int8"
    """Of pseudo-gradients and of the first moments that rounds carry (`codecs.averaging`)."""
    snapshot_every: Count = 8
    """Windows between the snapshots that joiners begin from (`checkpoint.snapshot_every`)."""
    straggler_s: NotNegative = 2.0
    """How long the others' windows are waited for once half of them are done (`deadlines.straggler_s`)."""
    sized: Literal["alike", "by_power"] = "alike"
    """alike: an inner step has as many tokens at each member, as runs have it. by_power: as many as let all windows
    last equally long, which is not built."""

    @property
    def settings(self) -> TrainingSettings:
        """Of such a run, as far as the bytes of its rounds and states depend on them."""
        return TrainingSettings(
            averaging=AveragingSettings(local_steps=self.local_steps),
            codecs=CodecSettings(averaging=self.averaging),
            checkpoint=CheckpointSettings(snapshot_every=self.snapshot_every),
        )


@dataclass(frozen=True, kw_only=True)
class WindowFleetPart(Table):
    """Peers and their lines, all lines alike."""

    peers: Annotated[int, Bounds(least=2, most=100_000)]
    power_ratio: Annotated[float, Bounds(least=1, most=1000)] = 10.0
    """Of the quickest machine's power to the slowest's: logarithms are spread evenly, the median is 1."""
    up_mbit: Positive
    down_mbit: Positive
    round_trip_ms: NotNegative = 40.0
    most_members: Count = MAX_MEMBERS
    """Others stand by. Runs take no more than the default."""
    stalls: Share = 0.0
    """Of members, in each window, whose owners need the machine for `stall_s` of it."""
    stall_s: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class WindowSessionPart(Table):
    """How long peers stay. As many come as go, and who goes, however it does, loses the window under way."""

    law: Law
    shape: Positive = 0.5
    turnover: Share
    """Share of the fleet that is replaced every `turnover_s`."""
    turnover_s: Positive = 3600.0


@dataclass(frozen=True, kw_only=True)
class WindowRunPart(Table):
    """How long to simulate."""

    seed: int = 0
    warm_up_s: NotNegative = 14_400.0
    measured_s: Positive = 172_800.0
    """Long beside a window and its round: those at the edges count whole or not at all."""
    lease_s: Positive = 15.0
    """Until a lost member's window is not waited for."""


@dataclass(frozen=True, kw_only=True)
class WindowScenario(Table):
    """Everything a simulation depends on."""

    name: str
    about: str = ""
    run: WindowRunPart = field(default_factory=WindowRunPart)
    windows: WindowPart
    fleet: WindowFleetPart
    sessions: WindowSessionPart

    @property
    def law(self) -> Sessions | None:
        """None if nobody leaves."""
        part = self.sessions
        return Sessions(part.law, part.turnover_s / part.turnover, part.shape) if part.turnover else None
