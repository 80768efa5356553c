"""What each peer may do: verdicts and what else is certified of it, folded.

What is merely observed (a screen that tripped, an audit that was not served) moves a peer between probation, member and
suspicious; verdicts (`verification.audit.verdicts`) keep it out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Version
from verification.audit.verdicts import Ban, Pardon, Promotion, Quarantine

SUSPICION_VERSIONS = 20
SUSPICION_FACTOR = 5.0
"""Of the audit budget."""
ALARM_VERSIONS = 12
"""From the deed of a banned peer on, all of its stage are audited as the suspicious are: liars seldom come alone."""
DEBT_VERSIONS = 100
DEBTS_TO_QUARANTINE = 3
FAULT_VERSIONS = 100
FAULTS_TO_STAY_OUT = 3
FAULT = "fault"
"""Kind of a quarantine for wrong work that the peer does not do again."""
KEPT_DEBTS = 16
"""The newest, of faults too; a peer with three in 100 versions is audited no more, and so makes no others."""


@dataclass(frozen=True)
class Suspicion:
    """Something at `version` asks for a closer look: a screen that tripped, an error past what is accepted."""

    peer_id: PeerId
    version: Version


@dataclass(frozen=True)
class AuditDebt:
    """An audit of the peer's work at `version` could not be served; one in a version counts."""

    peer_id: PeerId
    version: Version


Event: TypeAlias = Ban | Quarantine | Pardon | Promotion | Suspicion | AuditDebt


class Standing(Enum):
    PROBATION = "probation"
    MEMBER = "member"
    SUSPICIOUS = "suspicious"
    QUARANTINED = "quarantined"
    BANNED = "banned"


@dataclass(frozen=True)
class _Record:
    """What has been certified of one peer, by the events' own versions. Each field is a maximum or the newest of a set.

    So the record is the same in whatever order its events come, and however often each does.
    """

    deeds: tuple[tuple[StageIndex, Version], ...] = ()
    """What it is banned for: stage and version, sorted; of one stage the last."""
    quarantined_at: int = -1
    pardoned_at: int = -1
    """What is not younger than this counts no more."""
    begun_again_at: int = -1
    """The last pardon that was no acquittal."""
    suspected_at: int = -1
    acquitted_at: int = -1
    """The last pardon that was one."""
    promoted_at: int = -1
    debts: tuple[int, ...] = ()
    """Versions of the newest, sorted."""
    faults: tuple[int, ...] = ()
    """Versions of the newest, sorted."""

    def after(self, event: Event) -> "_Record":
        match event:
            case Ban():
                held = dict(self.deeds)
                held[event.stage] = max(event.version, held.get(event.stage, event.version))
                return replace(self, deeds=tuple(sorted(held.items())))
            case Quarantine():
                faults = _newest(self.faults, event.version) if event.kind == FAULT else self.faults
                return replace(self, quarantined_at=max(self.quarantined_at, event.version), faults=faults)
            case Pardon():
                begun_again_at, acquitted_at = self.begun_again_at, self.acquitted_at
                if event.acquitted:
                    acquitted_at = max(acquitted_at, event.version)
                else:
                    begun_again_at = max(begun_again_at, event.version)
                pardoned_at = max(self.pardoned_at, event.version)
                return replace(self, pardoned_at=pardoned_at, begun_again_at=begun_again_at, acquitted_at=acquitted_at)
            case Promotion():
                return replace(self, promoted_at=max(self.promoted_at, event.version))
            case Suspicion():
                return replace(self, suspected_at=max(self.suspected_at, event.version))
            case AuditDebt():
                return replace(self, debts=_newest(self.debts, event.version))

    @property
    def banned(self) -> bool:
        return bool(self.deeds)

    @property
    def unpaid(self) -> tuple[int, ...]:
        """Debts that no pardon covers."""
        return tuple(version for version in self.debts if version > self.pardoned_at)

    @property
    def is_quarantined(self) -> bool:
        owes_too_much = _are_close(self.unpaid, DEBTS_TO_QUARANTINE, DEBT_VERSIONS)
        return owes_too_much or self.is_beyond_repair or self.quarantined_at > self.pardoned_at

    @property
    def is_beyond_repair(self) -> bool:
        """Too many faults: no pardon but an acquittal lets it in again."""
        unforgiven = tuple(version for version in self.faults if version > self.acquitted_at)
        return _are_close(unforgiven, FAULTS_TO_STAY_OUT, FAULT_VERSIONS)

    @property
    def on_probation_since(self) -> int:
        """The version after which a promotion counts; -1: it was never sent back."""
        return max(self.begun_again_at, *self.unpaid, -1)

    def is_promoted(self, *, founder: bool) -> bool:
        return (founder and self.on_probation_since < 0) or self.promoted_at > self.on_probation_since

    def is_suspected(self, version: int) -> bool:
        recent = self.suspected_at <= version < self.suspected_at + SUSPICION_VERSIONS
        return recent and self.suspected_at > self.pardoned_at


_BLANK = _Record()


@dataclass(frozen=True)
class StandingTable:
    """Every peer's standing, folded from certified events: the same at all who know the same events.

    Signatures are checked before (`check`), not here.
    """

    founders: frozenset[PeerId] = frozenset()
    """Members from the start; everyone else begins on probation, and leaves it with a promotion."""
    has_probation: bool = True
    """Whether anybody is on probation: not in a run without replay audits (trust = "friends")."""
    records: Mapping[PeerId, _Record] = field(default_factory=dict)
    """Of the peers that any event was about."""
    deeds: Mapping[StageIndex, Version] = field(default_factory=dict)
    """Of each stage, the last version at which a member did what it is banned for."""

    def after(self, event: Event, version: Version) -> "StandingTable":
        """The table with an event that the certificate of `version` includes.

        Raises RemoteError("standing") for what is said to have been seen at a later version than that.
        """
        return self.after_all([(event, version)])

    def after_all(self, events: Iterable[tuple[Event, Version]]) -> "StandingTable":
        """As by `after`, one event after the other; who is known is copied once, not with each of them."""
        records, deeds = dict(self.records), dict(self.deeds)
        for event, version in events:
            if isinstance(event, Suspicion | AuditDebt) and event.version > version:
                what = type(event).__name__
                raise RemoteError("standing", f"{what} of {event.peer_id} at version {event.version}, it is {version}")
            record = records[event.peer_id] = records.get(event.peer_id, _BLANK).after(event)
            # Else whoever has a key to throw away could have a stage audit at a multiple of its budget.
            if self._was_member(event.peer_id, record):
                for stage, at in record.deeds:
                    deeds[stage] = max(at, deeds.get(stage, at))
        return replace(self, records=records, deeds=deeds)

    def standing(self, peer: PeerId, version: Version) -> Standing:
        """The peer's standing once the stage is at `version`."""
        record = self._record(peer)
        if record.banned:
            return Standing.BANNED
        if record.is_quarantined:
            return Standing.QUARANTINED
        if not self._is_promoted(peer):
            return Standing.PROBATION
        return Standing.SUSPICIOUS if record.is_suspected(version) else Standing.MEMBER

    def is_out(self, peer: PeerId) -> bool:
        """Whether nobody takes anything from the peer: it is quarantined or banned."""
        record = self._record(peer)
        return record.banned or record.is_quarantined

    def may_train(self, peer: PeerId) -> bool:
        """Whether hops and rosters take the peer: members and suspicious ones."""
        return not self.is_out(peer) and self._is_promoted(peer)

    def may_return(self, peer: PeerId) -> bool:
        """Whether the peer's quarantine is for a fault, and one that it has not shown too often."""
        record = self._record(peer)
        last = record.quarantined_at
        return not record.banned and not record.is_beyond_repair and last in record.faults and not record.unpaid

    def on_probation_since(self, peer: PeerId) -> int:
        """The version after which its replays, and its promotion, count."""
        return self._record(peer).on_probation_since

    def budget_factor(self, peer: PeerId, stage: StageIndex, version: Version) -> float:
        """By what the budget for audits of the peer's work at the stage is multiplied."""
        deed = self.deeds.get(stage)
        is_alarmed = deed is not None and deed <= version < deed + ALARM_VERSIONS
        return SUSPICION_FACTOR if is_alarmed or self._record(peer).is_suspected(version) else 1.0

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """Sorted."""
        return tuple(sorted(peer for peer, record in self.records.items() if record.banned))

    def was_member(self, peer: PeerId) -> bool:
        """Whether it ever was past its probation, whatever it is now."""
        return self._was_member(peer, self._record(peer))

    def _was_member(self, peer: PeerId, record: _Record) -> bool:
        return not self.has_probation or record.promoted_at >= 0 or peer in self.founders

    def _record(self, peer: PeerId) -> _Record:
        return self.records.get(peer, _BLANK)

    def _is_promoted(self, peer: PeerId) -> bool:
        return not self.has_probation or self._record(peer).is_promoted(founder=peer in self.founders)


def _newest(versions: tuple[int, ...], version: int) -> tuple[int, ...]:
    return tuple(sorted({*versions, version}, reverse=True)[:KEPT_DEBTS][::-1])


def _are_close(versions: tuple[int, ...], count: int, within: int) -> bool:
    """Whether any `count` of them, sorted, lie within so many versions."""
    return any(last - first < within for first, last in zip(versions, versions[count - 1 :], strict=False))
