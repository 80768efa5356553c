"""This is where the host's calls have their names and forms: what a peer asks of a run's coordinator and tells it."""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value, signed_bytes
from swarm.core.contribution import MAX_WORK
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item, peer_item
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.identity import verify

RUN = "run"
"""{} -> {settings, run_key, signature}: the run, signed by its key."""
ADMIT = "admit"
"""{stage | None, chain_end} -> {stage, ticket, promotion | None, bans, quarantines, pardons, debts}: this peer's stage,
and who is shut out or on probation again."""
GENESIS = "genesis"
"""{stage, ready, wait_s} -> {genesis | None, beside}: where the stage begins, once enough peers are ready; and where
the stages before and after it do, for their founders are known by that."""
FILE = "file"
"""{digest, offset} -> body: a piece of one of the run's files; to a peer of the first stage too."""
PIECES = "pieces"
"""{digest} -> {pieces, mirrors}: what each piece of the file is to be, signed by the run key, and the URLs of copies of
it; to a peer of the first stage too, which names none."""
RESULTS = "results"
"""To a peer: {from, wait_s, bodies} -> {version, oldest, results, sizes}, body: its stage's certified results from a
version on, a few at most; with `bodies` the encoded parts too, end to end."""
MAX_RESULTS_PER_CALL = 4
MAX_BARE_RESULTS_PER_CALL = 64
"""Without their bodies."""
REPORT = "report"
"""{report} -> {wants_result, minimum_release, credit}: what a peer did in a step; figures for people."""
RESULT = "result"
"""{result} -> {}: a round's signed result, for the ledger; from the first peer that is asked for it."""
STANDING = "standing"
"""To a peer: {} -> {version, view, closing, basis}: where its stage is; whether its step is closing."""
RECONFIGURE = "reconfigure"
"""Host to peer: {reconfiguration} -> {}: other voters for the present round, signed by the run key."""
ROLLBACK = "rollback"
"""Host to peer: {genesis, beside, to_version} -> {}: the stages begin again, signed by the run key, from what they were
at that version; `beside` as in GENESIS."""
ANCHOR = "anchor"
"""{stage, version} -> {anchor}: the run key's word on a state of the stage, the latest up to the version."""
STATE = "state"
"""{statement}, body: the peer's signed word for its state at a snapshot, and the hashes of all of its chunks -> {}."""
STATED = "stated"
"""{stage, version, digest} -> {statements}, body: who signs another digest of the version, and the hashes of their
chunks, end to end; a few at most."""
WITHDRAW = "withdraw"
"""{version} -> {}: this peer has found its state wrong, and takes back what it stated up to that version."""
WITHDRAWN = "withdrawn"
"""Kind of the error that answers an accusation of a state that its maker has taken back."""
ACCUSE = "accuse"
"""{accused, digest, size, at}, body: a piece of an evidence file -> {next}: where the next piece is to begin; the size
once the file is here, and is judged soon after, or is not wanted any more."""
OWED = "owed"
"""{owed} -> what the target answers the host: an audit that the target did not serve its auditor; refused: a debt."""
EXHIBIT = "audit_exhibit"
"""To a peer: {step, ticket, reveal, microbatch_id} -> {papers, sizes} with the exhibit's five bodies, end to end."""
PART = "audit_part"
"""To a peer: {step, ticket, reveal, part, of} -> body: an encoded part of the contribution of `of`, which is the peer
itself or another whose part it reduced."""
HOP = "audit_hop"
"""To a peer: {step, ticket, reveal, target, microbatch_id, contribution | None, header | None} -> {exchanges} with
their bodies, end to end: its calls with the target, a peer of a stage beside it; or, if it is the target, what its
header of that digest is over and was made from. What was drawn is the microbatch, or the contribution."""
BAN = "ban"
"""Host to peer: {ban} -> {}: signed by the run key."""
QUARANTINE = "quarantine"
"""Host to peer: {quarantine} -> {}: signed by the run key; the peer is kept out until it is pardoned."""
PARDON = "pardon"
"""Host to peer: {pardon} -> {}: signed by the run key; a quarantine ends."""
AGREED = "agreed"
"""{agreement} -> {promotion | None}: a newcomer's replay was what a member has; enough of them promote it."""
PROMOTE = "promote"
"""To a peer: {promotion} -> {}: signed by the run key; the peer it names is past its probation."""
DEBT = "debt"
"""To a peer: {debt} -> {}: signed by the run key; the peer it names did not serve an audit, and is on probation."""
PLEA = "plea"
"""Host to the accused: {}, body: the evidence without its past -> {plea, sizes}, bodies: the same work, done again."""
RETURN = "return"
"""{} -> {pardon}: a peer that is out for a fault, and has tested itself, is a newcomer again."""
RELAY = "relay"
"""{} -> {peer_id | None, addresses, refusal}: where a peer that cannot be dialled may be reached through."""
FINISH = "finish"
"""Host to peer: {} -> {}: the run is over, go."""
GOODBYE = "goodbye"
"""{} -> {}: this peer leaves."""

MAX_SETTINGS_BYTES = 1 << 20
MAX_ACCUSATION_PIECE_BYTES = 4 << 20
MAX_CASE_BYTES = 1 << 30
"""Of evidence without its past, which goes to a juror, or to the accused, in one message."""
MAX_BANS = 4096
MAX_SCREENS = 64
"""Kinds in a report."""
MAX_RELAY_ADDRESSES = 8
MAX_RANK = 2**32 - 1


def max_exhibit_bytes(settings: RunSettings, hidden_size: int) -> int:
    """Bound on an exhibit's bodies: four encoded tensors of one microbatch, its targets and input ids."""
    num_tokens = settings.batch.microbatch_size * settings.data.sequence_length
    return 4 * 4 * num_tokens * hidden_size + 2 * 4 * num_tokens


@dataclass(frozen=True)
class AccusationPiece:
    """Which piece of which evidence file a message brings."""

    accused: PeerId
    digest: bytes
    """The evidence's: the SHA-256 that the file ends with."""
    size: int
    """Of the file."""
    at: int
    """Where in it the piece begins."""

    def to_value(self) -> dict[str, Value]:
        return {"accused": self.accused, "digest": self.digest, "size": self.size, "at": self.at}

    @classmethod
    def from_value(cls, value: Value) -> "AccusationPiece":
        """Raises RemoteError("malformed")."""
        fields = Fields("accusation", value)
        size = fields.integer("size", low=1)
        made = cls(
            fields.peer("accused"), fields.octets("digest", length=32), size, fields.integer("at", high=size - 1)
        )
        fields.done()
        return made


@dataclass(frozen=True)
class SignedRun:
    """A run's settings in canonical bytes, under the signature of its run key."""

    DOMAIN: ClassVar[str] = "run"
    settings: bytes
    run_key: PeerId
    signature: bytes = b""

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, [self.run_key, self.settings])

    def to_value(self) -> dict[str, Value]:
        return {"settings": self.settings, "run_key": self.run_key, "signature": self.signature}

    @classmethod
    def from_value(cls, value: Value) -> "SignedRun":
        """Raises RemoteError unless the settings are signed by the key they name."""
        fields = Fields("run", value)
        made = cls(
            fields.octets("settings", max_length=MAX_SETTINGS_BYTES),
            fields.peer("run_key"),
            fields.octets("signature", length=64),
        )
        fields.done()
        if not verify(made.run_key, made.signed_bytes(), made.signature):
            raise RemoteError("signature", "the run's settings are not signed by the run key", made.run_key)
        return made


def seed_topic(host: PeerId) -> str:
    """Where in the directory the host's other seeds tell their {addresses}."""
    return f"seeds/{host}"


def relay_topic(host: PeerId) -> str:
    """Where in the directory peers tell of relays that they run: each a `RelayOffer`."""
    return f"relays/{host}"


@dataclass(frozen=True, kw_only=True)
class RelayOffer:
    """A relay, or why there is none."""

    peer_id: PeerId | None = None
    addresses: tuple[str, ...] = ()
    """Where it listens: multiaddresses."""
    refusal: str = ""

    def to_value(self) -> dict[str, Value]:
        return {"peer_id": self.peer_id, "addresses": [*self.addresses], "refusal": self.refusal}

    @classmethod
    def from_value(cls, value: Value) -> "RelayOffer":
        fields = Fields("relay offer", value)
        made = cls(
            peer_id=fields.maybe("peer_id", peer_item),
            addresses=fields.items("addresses", _address, max_items=MAX_RELAY_ADDRESSES),
            refusal=fields.text("refusal"),
        )
        fields.done()
        return made


@dataclass(frozen=True, kw_only=True)
class Credited:
    """What the host's ledger credits a peer with, over all its starts."""

    num_tokens: int
    num_microbatches: int
    num_steps: int
    rank: int
    """Place among all who have credit, from 1; 0 for who has none, or is shut out."""
    num_ranked: int

    def to_value(self) -> dict[str, Value]:
        return {**self.__dict__}

    @classmethod
    def from_value(cls, value: Value) -> "Credited":
        fields = Fields("credit", value)
        made = cls(
            num_tokens=fields.integer("num_tokens"),
            num_microbatches=fields.integer("num_microbatches"),
            num_steps=fields.integer("num_steps"),
            rank=fields.integer("rank", high=MAX_RANK),
            num_ranked=fields.integer("num_ranked", high=MAX_RANK),
        )
        fields.done()
        return made


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one peer tells the host after a step. Nothing is decided by it."""

    stage: int
    version: int
    """The version the step made."""
    loss_sum: float
    """Stage 0: over this source's microbatches of the step."""
    num_targets: int
    stale: int
    counted: int
    round_s: float
    round_bytes: int
    """Sent in the round."""
    overlap: float
    """Share of `round_s` in which microbatches were computed."""
    gradient_norm: float
    microbatches: int
    evaluated: int
    reassigned: int
    stragglers: int
    refused: int
    sent_bytes: int
    received_bytes: int
    busy_s: float
    """Seconds the compute thread has worked so far."""
    exact_s: float
    """And the thread of rounds and steps."""
    screens: tuple[tuple[str, int], ...]
    """How often each kind of screen tripped here so far, sorted."""
    state_digest: bytes
    """Of the version, where a snapshot was made; else empty."""
    not_finite: tuple[int, ...]
    """Microbatches of this peer's that added nothing to the step, for a loss or a gradient was not finite."""

    def to_value(self) -> dict[str, Value]:
        screens: list[Value] = [[kind, count] for kind, count in self.screens]
        return {**self.__dict__, "screens": screens, "not_finite": list(self.not_finite)}

    @classmethod
    def from_value(cls, value: Value) -> "StepReport":
        fields = Fields("step report", value)
        made = cls(
            stage=fields.integer("stage"),
            version=fields.integer("version"),
            loss_sum=fields.number("loss_sum"),
            num_targets=fields.integer("num_targets"),
            stale=fields.integer("stale"),
            counted=fields.integer("counted"),
            round_s=fields.number("round_s"),
            round_bytes=fields.integer("round_bytes"),
            overlap=fields.number("overlap"),
            gradient_norm=fields.number("gradient_norm"),
            microbatches=fields.integer("microbatches"),
            evaluated=fields.integer("evaluated"),
            reassigned=fields.integer("reassigned"),
            stragglers=fields.integer("stragglers"),
            refused=fields.integer("refused"),
            sent_bytes=fields.integer("sent_bytes"),
            received_bytes=fields.integer("received_bytes"),
            busy_s=fields.number("busy_s"),
            exact_s=fields.number("exact_s"),
            screens=fields.items("screens", _screen_count, max_items=MAX_SCREENS),
            state_digest=fields.octets("state_digest", max_length=32),
            not_finite=fields.items("not_finite", integer_item, max_items=MAX_WORK),
        )
        fields.done()
        return made


def _address(value: Value) -> str:
    return Fields("relay offer", {"address": value}).text("address", max_length=300)


def _screen_count(value: Value) -> tuple[str, int]:
    fields = Fields.of_list("screen", value, "kind", "count")
    return fields.text("kind", max_length=32), fields.integer("count")
