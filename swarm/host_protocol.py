"""The host's calls, their names and forms: what a peer asks of a run's host and tells it."""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from swarm.core.audit.honest_audits import AuditsMade
from swarm.core.errors import KINDS, RemoteError
from swarm.core.forms import Digest, Integer, Octets, OneOf, Text
from swarm.core.ids import PeerId
from swarm.core.layout import AtMost
from swarm.core.record import Record
from swarm.core.round.contribution import MAX_WORK
from swarm.core.settings import RunSettings

RUN = "run"
"""{} -> {settings, run_key, amendments, signature}: the run, signed by its key; to a peer that trains too."""
ADMIT = "admit"
"""{stage | None, chain_end} -> {stage, ticket, promotion | None, bans, quarantines, pardons, debts}: this peer's stage,
and who is shut out or on probation again."""
GENESIS = "genesis"
"""{stage, ready, wait_s, amendments} -> {genesis | None, beside, to_version, begins, is_lost, waits_for, amendments}:
where the stage begins, once enough peers are ready, and where the stages before and after it do, for their founders are
known by that; of which version its state was; whether nobody is known to have gone on from there; whether nobody trains
there any more, as far as the host knows; what is waited for, in words.
`ready`: the caller has found nobody of its stage who trains. `amendments`: so many are known; to who knows fewer than
are in force nothing but their number is said."""
ENDING = "ending"
"""Host to peer: {ending} -> {in_time, digest | None}: signed by the run key; the era ends at a version, to be amended.
Whether the state of that version is kept here or will be, and its digest."""
FILE = "file"
"""{digest, piece} -> body: a piece of one of the run's files; to a peer of the first stage too."""
HELD = "held"
"""To either: {digest} -> {held}: runs of the pieces that are there, [start, stop, ...]."""
PIECES = "pieces"
"""{digest} -> {pieces, mirrors}: what each piece of the file is to be, and the URLs of copies of it; to a peer of the
first stage too, which names none."""
RESULTS = "results"
"""To a peer: {from, wait_s} -> {version, oldest, results}: its stage's certified results from a version on, a few at
most. Their parts are fetched one by one."""
MAX_RESULTS_PER_CALL = 64
REPORT = "report"
"""{report} -> {wants_result, minimum_release, credit}: what a peer did in a step; figures for people."""
RESULT = "result"
"""{result} -> {}: a round's signed result, for the ledger; from the first peer that is asked for it."""
BEACON = "beacon"
"""{stage, lineage} -> {said}: the host's last word on a stage (`swarm.core.audit.chance`): on all versions of it that
it knows to be certified."""
STANDING = "standing"
"""To a peer: {} -> {version, view, closing, basis}: where its stage is; whether its step is closing."""
RECONFIGURE = "reconfigure"
"""Host to peer: {reconfiguration} -> {}: other voters for the present round, signed by the run key."""
HOLDINGS = "holdings"
"""Host to peer: {} -> {held: [[lineage, oldest, newest], ...]}: which versions of its stage it can make again."""
PREPARE = "prepare"
"""Host to peer: {lineage, version, number} -> {newest, state | None}, body: the hashes of its chunks and the first
chunk: the state of that version under that number, once it is made. Until the stage begins again, or some time has
passed, the peer takes no step; `newest` is the version it stands at."""
HAND_OVER = "hand_over"
"""{stage, start, version, ready} -> {wanted}: a peer is about to leave; `wanted`: nobody else holds its stage. `ready`:
it stands still, and the host fetches its snapshot of version `start`, and the results from there to `version`, before
it answers."""
MAX_HOLDINGS = 64
ROLLBACK = "rollback"
"""Host to peer: {genesis, beside, to_version} -> {}: the stages begin again, signed by the run key, from what they were
at that version; `beside` as in GENESIS."""
POST = "post"
"""Host to peer: {posting} -> {}: signed by the run key; the peer is to serve another stage."""
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
"""Host to the accused: {}, body: the evidence without its past -> {plea, sizes}, bodies: the same work, done again.

Who has the weights no more refuses with `PAST_IS_GONE`, and is shown the evidence whole."""
PAST_IS_GONE = "past"
RETURN = "return"
"""{} -> {pardon}: a peer that is out for a fault, and has tested itself, is a newcomer again."""
RELAY = "relay"
"""{} -> {peer_id | None, addresses, refusal}: where a peer that cannot be dialled may be reached through."""
OVER = "over"
"""Kind of the error that answers ADMIT once the run is over."""
FINISH = "finish"
"""Host to peer: {} -> {}: the run is over, go."""
GOODBYE = "goodbye"
"""{version | None} -> {}: this peer leaves, and has made no version of its stage beyond that."""

MAX_ACCUSATION_PIECE_BYTES = 4 << 20
MAX_CASE_BYTES = 1 << 30
"""Of evidence without its past, which goes to a juror, or to the accused, in one message; or to the accused with it."""
MAX_BANS = 4096
SCREENS = tuple(
    sorted(KINDS | {"activation_norm", "gradient_norm", "contribution_norm", "directory_record", "other_activation"})
)
"""Kinds in a report."""
MAX_RELAY_ADDRESSES = 8
MAX_RANK = 2**32 - 1
MOST_SECONDS = 1e6
"""That an exchange takes."""
MOST_NATS = 1e30
"""A target: more is no loss that is passed on, or written down for ever."""
MOST_COUNTED, MOST_FIGURE = 1 << 46, 1e60
"""In a report: what all identities together may report of a step is a number that the host can write down and show."""


def max_exhibit_bytes(settings: RunSettings, hidden_size: int) -> int:
    """Bound on an exhibit's bodies: four encoded tensors of one microbatch, its targets and input ids."""
    num_tokens = settings.batch.microbatch_size * settings.data.sequence_length
    return 4 * 4 * num_tokens * hidden_size + 2 * 4 * num_tokens


@dataclass(frozen=True)
class AccusationPiece(Record, kind="accusation"):
    """Which piece of which evidence file a message brings."""

    accused: PeerId
    digest: Digest
    """The evidence's: the SHA-256 that the file ends with."""
    size: Annotated[int, Integer(low=1)]
    """Of the file."""
    at: int
    """Where in it the piece begins."""

    def _check_fields(self) -> None:
        Integer(high=self.size - 1).read(self.at, "accusation.at")


def seed_topic(host: PeerId) -> str:
    """Where in the directory the host's other seeds tell their {addresses}."""
    return f"seeds/{host}"


def relay_topic(host: PeerId) -> str:
    """Where in the directory peers tell of relays that they run: each a `RelayOffer`."""
    return f"relays/{host}"


@dataclass(frozen=True, kw_only=True)
class RelayOffer(Record):
    """A relay, or why there is none."""

    peer_id: PeerId | None = None
    addresses: Annotated[tuple[Annotated[str, Text(300)], ...], AtMost(MAX_RELAY_ADDRESSES)] = ()
    """Where it listens: multiaddresses."""
    refusal: str = ""
    carries_bulk: bool = True
    """Else control alone: its owner's budget for bulk is used up."""


@dataclass(frozen=True, kw_only=True)
class Credited(Record, kind="credit"):
    """What the host's ledger credits a peer with, over all its starts."""

    num_tokens: int
    num_microbatches: int
    num_steps: int
    rank: Annotated[int, Integer(high=MAX_RANK)]
    """Place among all who have credit, from 1; 0 for who has none, or is shut out."""
    num_ranked: Annotated[int, Integer(high=MAX_RANK)]


Count: TypeAlias = Annotated[int, Integer(high=MOST_COUNTED)]
NumLinks: TypeAlias = Annotated[int, Integer(high=1 << 16)]


@dataclass(frozen=True, kw_only=True)
class StepReport(Record):
    """What one peer tells the host after a step. Nothing is decided by it but who is posted to a slow stage, and by no
    one's word."""

    stage: int
    version: int
    """The version the step made."""
    loss_sum: float
    """Stage 0: over this source's microbatches of the step."""
    num_targets: Count
    stale: Count
    counted: Count
    round_s: float
    round_bytes: Count
    """Sent in the round."""
    overlap: float
    """Share of `round_s` in which microbatches were computed."""
    gradient_norm: float
    microbatches: Count
    evaluated: Count
    reassigned: Count
    stragglers: Count
    refused: Count
    sent_bytes: Count
    received_bytes: Count
    busy_s: float
    """Seconds the compute thread has worked so far."""
    exact_s: float
    """And the thread of rounds and steps."""
    screens: Annotated[tuple[tuple[Annotated[str, OneOf(SCREENS)], Count], ...], AtMost(len(SCREENS))]
    """How often each kind of screen tripped here so far, sorted."""
    state_digest: Annotated[bytes, Octets(max_length=32)]
    """Of the version, where a snapshot was made; else empty."""
    num_direct: NumLinks
    """Links of this peer to others of its stage and of those beside it, by how they are reached."""
    num_punched: NumLinks
    num_relayed: NumLinks
    not_finite: Annotated[tuple[int, ...], AtMost(MAX_WORK)]
    """Microbatches of this peer's that added nothing to the step, for a loss or a gradient was not finite."""
    answered_s: float
    """From a microbatch's arrival to its answer, where it was quickest lately; at the first stage from where it begins
    to where it ends; 0: not known."""
    waited_s: float
    """From where one was sent on to its answer, where it was quickest lately; 0: not known, or the last stage."""
    audits: AuditsMade

    def _check_fields(self) -> None:
        for seconds in (self.answered_s, self.waited_s):
            if not 0 <= seconds <= MOST_SECONDS:
                raise RemoteError("malformed", f"an exchange of {seconds} s")
        figures = self.loss_sum, self.round_s, self.overlap, self.gradient_norm, self.busy_s, self.exact_s
        if max(map(abs, figures)) > MOST_FIGURE:
            raise RemoteError("malformed", f"a figure of {max(map(abs, figures))}")
