"""This is where verdicts have their form, and where they are folded into what each peer may do.

A ban is for ever and signed by the run key. A quarantine lasts until the run key pardons it; three jurors, drawn after
the evidence was committed, can impose one too. What is merely certified (a screen that tripped, an audit that was not
served, an answer that agreed) moves a peer between probation, member and suspicious.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, Self, TypeAlias

from swarm.core.canonical import Value, digest, signed_bytes
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.ranking import rank
from swarm.identity import Identity, verify
from verification.tolerance import Grade

FEWEST_REPLICAS = 5
"""A stage with fewer has no jury: without accuser and accused fewer than three are left."""
NUM_JURORS = 3
VOTES_TO_QUARANTINE = 2
SUSPICION_VERSIONS = 20
SUSPICION_FACTOR = 5.0
"""Of the audit budget."""
DEBT_VERSIONS = 100
DEBTS_TO_QUARANTINE = 3
AGREEMENTS_TO_PROMOTE = 10
KEPT_DEBTS = 16
"""The newest; a peer with three in 100 versions is audited no more, and so makes no others."""


@dataclass(frozen=True)
class _Signed(ABC):
    DOMAIN: ClassVar[str]
    signature: bytes = field(default=b"", kw_only=True)

    @abstractmethod
    def signed_value(self) -> Value: ...

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self.signed_value())

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.signed_value())

    def to_value(self) -> Value:
        return {"value": self.signed_value(), "signature": self.signature}

    def signed_by(self, identity: Identity) -> Self:
        return replace(self, signature=identity.sign(self.signed_bytes()))

    def _check_signature(self, run_id: str, expected_run_id: str, signer: PeerId) -> None:
        if run_id != expected_run_id:
            raise RemoteError("protocol", f"{self.DOMAIN} of run {run_id[:12]}, not {expected_run_id[:12]}")
        if not verify(signer, self.signed_bytes(), self.signature):
            raise RemoteError("signature", f"{self.DOMAIN} is not signed by {signer}")


@dataclass(frozen=True)
class _Charge(_Signed):
    """Who is said to have done what, and which evidence says so."""

    run_id: str
    peer_id: PeerId
    """The accused."""
    stage: StageIndex
    version: Version
    """Of the stage, at the deed."""
    kind: str
    """The evidence's."""
    evidence_digest: bytes

    @property
    def charge(self) -> dict[str, Value]:
        return {
            "run_id": self.run_id,
            "peer_id": self.peer_id,
            "stage": self.stage,
            "version": self.version,
            "kind": self.kind,
            "evidence_digest": self.evidence_digest,
        }

    def signed_value(self) -> Value:
        return self.charge


@dataclass(frozen=True)
class Ban(_Charge):
    """The run key's last word on a peer: nobody takes anything from it any more."""

    DOMAIN: ClassVar[str] = "ban"

    def check(self, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        self._check_signature(self.run_id, run_id, run_key)

    @classmethod
    def from_value(cls, value: Value) -> "Ban":
        outer, fields = _opened(cls.DOMAIN, value)
        made = cls(*_read_charge(fields), signature=outer.octets("signature", length=64))
        fields.done()
        outer.done()
        return made


@dataclass(frozen=True)
class JurorVote(_Charge):
    """What a juror found when it replayed the evidence. It covers the whole charge, so that it counts for no other."""

    DOMAIN: ClassVar[str] = "juror-vote"
    juror: PeerId
    verdict: Grade

    def signed_value(self) -> Value:
        return {**self.charge, "juror": self.juror, "verdict": self.verdict.value}

    def check(self, run_id: str) -> None:
        """Raises RemoteError unless the juror signed it in this run."""
        self._check_signature(self.run_id, run_id, self.juror)

    @classmethod
    def from_value(cls, value: Value) -> "JurorVote":
        outer, fields = _opened(cls.DOMAIN, value)
        charge, juror, verdict = _read_charge(fields), fields.peer("juror"), fields.text("verdict", max_length=16)
        if verdict not in {grade.value for grade in Grade}:
            raise RemoteError("malformed", f"verdict is {verdict!r}")
        made = cls(*charge, juror, Grade(verdict), signature=outer.octets("signature", length=64))
        fields.done()
        outer.done()
        return made


@dataclass(frozen=True)
class Quarantine(_Charge):
    """A peer is kept out until it is pardoned: by the run key's signature, or by jurors' votes and no signature."""

    DOMAIN: ClassVar[str] = "quarantine"
    votes: tuple[JurorVote, ...] = ()

    def check(self, run_id: str, run_key: PeerId, *, drawn: tuple[PeerId, ...] = ()) -> None:
        """Raises RemoteError unless the run key signed it or two of the `drawn` jurors (see `jurors`) found fraud."""
        if self.signature:
            self._check_signature(self.run_id, run_id, run_key)
            return
        for vote in self.votes:
            vote.check(run_id)
            if vote.juror not in drawn:
                raise RemoteError("verdict", f"{vote.juror} was not drawn as a juror of {self.peer_id}", vote.juror)
            if vote.charge != self.charge:
                raise RemoteError("verdict", f"{vote.juror} voted on another charge than {self.peer_id}'s quarantine")
        found = {vote.juror for vote in self.votes if vote.verdict is Grade.FRAUD}
        if len(found) < VOTES_TO_QUARANTINE:
            raise RemoteError(
                "verdict", f"{len(found)} of {len(drawn)} jurors found {self.peer_id} guilty, not {VOTES_TO_QUARANTINE}"
            )

    def to_value(self) -> Value:
        return {
            "value": self.signed_value(),
            "votes": [vote.to_value() for vote in self.votes],
            "signature": self.signature,
        }

    @classmethod
    def from_value(cls, value: Value) -> "Quarantine":
        outer, fields = _opened(cls.DOMAIN, value)
        made = cls(
            *_read_charge(fields),
            outer.items("votes", JurorVote.from_value, max_items=NUM_JURORS),
            signature=outer.octets("signature", max_length=64),
        )
        fields.done()
        outer.done()
        if len(made.signature) not in (0, 64):
            raise RemoteError("malformed", f"quarantine.signature is of {len(made.signature)} bytes, not 0 or 64")
        return made


@dataclass(frozen=True)
class Pardon(_Signed):
    """The run key lifts quarantines, debts and suspicions of up to `version`, and no ban."""

    DOMAIN: ClassVar[str] = "pardon"
    run_id: str
    peer_id: PeerId
    version: Version
    acquitted: bool
    """True: it did no wrong, and is what it was. False: it was a fault, and begins again on probation."""

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "peer_id": self.peer_id,
            "version": self.version,
            "acquitted": self.acquitted,
        }

    def check(self, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        self._check_signature(self.run_id, run_id, run_key)

    @classmethod
    def from_value(cls, value: Value) -> "Pardon":
        outer, fields = _opened(cls.DOMAIN, value)
        made = cls(
            fields.text("run_id"),
            fields.peer("peer_id"),
            Version(fields.integer("version")),
            fields.boolean("acquitted"),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        return made


def jurors(
    members: Iterable[PeerId], *, accuser: PeerId, accused: PeerId, evidence_digest: bytes, next_name: bytes
) -> tuple[PeerId, ...]:
    """Three of the stage's members without both parties; none below five replicas, where the run key judges alone.

    `next_name` is the name of the first version made after the evidence was committed: nobody can choose evidence
    by its jurors.
    """
    replicas = set(members)
    if len(replicas) < FEWEST_REPLICAS:
        return ()
    return rank(replicas - {accuser, accused}, "juror", evidence_digest, accused, next_name)[:NUM_JURORS]


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


@dataclass(frozen=True)
class Agreement:
    """The peer replayed a drawn audit at `version` and committed what others found too; one in a version counts."""

    peer_id: PeerId
    version: Version


Event: TypeAlias = Ban | Quarantine | Pardon | Suspicion | AuditDebt | Agreement


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

    banned: bool = False
    quarantined_at: int = -1
    pardoned_at: int = -1
    """What is not younger than this counts no more."""
    begun_again_at: int = -1
    """The last pardon that was no acquittal."""
    suspected_at: int = -1
    debts: tuple[int, ...] = ()
    """Versions of the newest, sorted."""
    agreements: tuple[int, ...] = ()
    """Versions of the newest, sorted: as many as promote."""

    def after(self, event: Event, agreements_to_promote: int) -> "_Record":
        match event:
            case Ban():
                return replace(self, banned=True)
            case Quarantine():
                return replace(self, quarantined_at=max(self.quarantined_at, event.version))
            case Pardon():
                begun_again_at = self.begun_again_at if event.acquitted else max(self.begun_again_at, event.version)
                pardoned_at = max(self.pardoned_at, event.version)
                return replace(self, pardoned_at=pardoned_at, begun_again_at=begun_again_at)
            case Suspicion():
                return replace(self, suspected_at=max(self.suspected_at, event.version))
            case AuditDebt():
                return replace(self, debts=_newest(self.debts, event.version, KEPT_DEBTS))
            case Agreement():
                return replace(self, agreements=_newest(self.agreements, event.version, agreements_to_promote))

    @property
    def unpaid(self) -> tuple[int, ...]:
        """Debts that no pardon covers."""
        return tuple(version for version in self.debts if version > self.pardoned_at)

    @property
    def is_quarantined(self) -> bool:
        unpaid, more = self.unpaid, DEBTS_TO_QUARANTINE - 1
        too_many = any(last - first < DEBT_VERSIONS for first, last in zip(unpaid, unpaid[more:], strict=False))
        return too_many or self.quarantined_at > self.pardoned_at

    def is_promoted(self, *, founder: bool, agreements_to_promote: int) -> bool:
        on_probation_since = max(self.begun_again_at, *self.unpaid, -1)
        if founder and on_probation_since < 0:
            return True
        return sum(version > on_probation_since for version in self.agreements) >= agreements_to_promote

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
    """Members from the start; everyone else begins on probation."""
    agreements_to_promote: int = AGREEMENTS_TO_PROMOTE
    """0 in a run without replay audits (trust = "friends"): there is no probation."""
    records: Mapping[PeerId, _Record] = field(default_factory=dict)
    """Of the peers that any event was about."""

    def after(self, event: Event, version: Version) -> "StandingTable":
        """The table with an event that the certificate of `version` includes.

        Raises RemoteError("standing") for what is said to have been seen at a later version than that.
        """
        if isinstance(event, Suspicion | AuditDebt | Agreement) and event.version > version:
            what = type(event).__name__
            raise RemoteError("standing", f"{what} of {event.peer_id} at version {event.version}, it is {version}")
        record = self._record(event.peer_id).after(event, self.agreements_to_promote)
        return replace(self, records={**self.records, event.peer_id: record})

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

    def may_train(self, peer: PeerId) -> bool:
        """Whether hops and rosters take the peer: members and suspicious ones."""
        record = self._record(peer)
        return not record.banned and not record.is_quarantined and self._is_promoted(peer)

    def budget_factor(self, peer: PeerId, version: Version) -> float:
        """By what the budget for audits of the peer is multiplied."""
        return SUSPICION_FACTOR if self._record(peer).is_suspected(version) else 1.0

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """Sorted."""
        return tuple(sorted(peer for peer, record in self.records.items() if record.banned))

    def _record(self, peer: PeerId) -> _Record:
        return self.records.get(peer, _BLANK)

    def _is_promoted(self, peer: PeerId) -> bool:
        return self._record(peer).is_promoted(
            founder=peer in self.founders, agreements_to_promote=self.agreements_to_promote
        )


def _newest(versions: tuple[int, ...], version: int, num: int) -> tuple[int, ...]:
    return tuple(sorted({*versions, version}, reverse=True)[:num][::-1])


def _opened(kind: str, value: Value) -> tuple[Fields, Fields]:
    """Readers of a signed message and of its value."""
    outer = Fields(kind, value)
    return outer, Fields(kind, outer.message("value"))


def _read_charge(fields: Fields) -> tuple[str, PeerId, StageIndex, Version, str, bytes]:
    return (
        fields.text("run_id"),
        fields.peer("peer_id"),
        StageIndex(fields.integer("stage", high=1 << 16)),
        Version(fields.integer("version")),
        fields.text("kind", max_length=64),
        fields.octets("evidence_digest", length=32),
    )
