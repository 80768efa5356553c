"""The host's ledger added up: who was admitted, where the stages are, what each peer has done.

The only way to change the books is to apply the next event of the ledger, so that a host that is started again holds
what it held before. What is only for people to look at, and may be lost, is in progress.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bootstrap.program.ledger import Event, Ledger
from swarm.core.canonical import Value, digest
from swarm.core.errors import LocalError
from swarm.core.ids import PeerId
from swarm.core.state.stage_chain import Genesis
from swarm.manifest.amendment import CUT
from swarm.manifest.signed_run import Amendment
from verification.audit.standing import FAULT

KEPT_CREDIT = 32
"""Steps of each stage whose credit can still be taken back by itself; evidence is younger."""
KEPT_SIGNED = 6
"""Anchors of each stage, and checkpoints."""


@dataclass(frozen=True)
class Admitted:
    """A peer that was given a ticket."""

    stage: int | None
    """None: the stages are others since."""
    at: float


@dataclass(frozen=True)
class Credit:
    """What certified results say a peer has done, less what was refuted since."""

    num_tokens: int = 0
    num_microbatches: int = 0
    num_steps: int = 0


@dataclass(frozen=True)
class Voucher:
    """A secret that the host gave away: whoever shows it is admitted, as often as `uses`."""

    note: str
    uses: int
    expires_at: float
    used_by: tuple[PeerId, ...] = ()
    revoked: bool = False


@dataclass
class Books:
    """All that the ledger's events add up to."""

    num_events: int = 0
    """Number of the last event in here."""
    history: bytes = bytes(32)
    """Hash chain over all events so far, also those of which nothing else is kept here: 32 bytes that stand for all of
    it. Equal chains, equal books."""
    geneses: dict[int, Genesis] = field(default_factory=dict)
    lineages: dict[int, int] = field(default_factory=dict)
    """How often each stage has begun."""
    versions: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Of each stage: the version that its last certified result made, and its name."""
    peers: dict[PeerId, Admitted] = field(default_factory=dict)
    credit: dict[PeerId, Credit] = field(default_factory=dict)
    recent_credit: dict[tuple[int, int], list[tuple[PeerId, int, int]]] = field(default_factory=dict)
    """What the last steps have brought whom, by stage and step: it is taken back from whose work is refuted."""
    vouchers: dict[str, Voucher] = field(default_factory=dict)
    """By the SHA-256 of the secret, in hex."""
    tickets: dict[PeerId, Value] = field(default_factory=dict)
    verdicts: dict[PeerId, dict[str, Value]] = field(default_factory=dict)
    """What is in force of bans and quarantines."""
    anchors: dict[int, dict[int, Value]] = field(default_factory=dict)
    """The newest of each stage, by version."""
    checkpoints: dict[int, Value] = field(default_factory=dict)
    """The newest, by version."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Held-out loss by version."""
    scores: dict[int, Value] = field(default_factory=dict)
    """How the newest checkpoints that were tried at tasks did, by version."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """(version gone back to, version it goes on as): those between are of abandoned branches."""
    ending: Value = None
    """The run key's last word that an era is to end, until it has been amended."""
    amendments: list[Value] = field(default_factory=list)
    """All that are in force."""
    _ranked: tuple[int, dict[PeerId, int]] = field(default=(-1, {}), compare=False)
    """Event of the last look, and what it found."""

    def catch_up(self, ledger: Ledger) -> None:
        """Apply what the ledger has beyond what is in here."""
        for event in ledger.events(after=self.num_events):
            self.apply(event)

    def apply(self, event: Event) -> None:
        """The next event. Raises LocalError for one that this version of the host cannot have written."""
        assert event.number > self.num_events, f"event {event.number} after {self.num_events}"
        facts: Any = event.facts
        try:
            self._apply(event.kind, facts, event.at)
        except (KeyError, TypeError, ValueError) as error:
            raise LocalError(f"event {event.number} of the ledger, a {event.kind}, cannot be read: {error}") from error
        self.num_events = event.number
        self.history = digest("ledger-event", [self.history, event.number, event.kind, event.facts])

    def _apply(self, kind: str, facts: Any, at: float) -> None:
        match kind:
            case "genesis":
                genesis = Genesis.from_value(facts)
                stage = int(genesis.stage)
                self.geneses[stage] = genesis
                self.lineages[stage] = self.lineages.get(stage, 0) + 1
                self.versions[stage] = int(genesis.version), genesis.name
                self.anchors.pop(stage, None)
            case "admitted":
                self.peers[PeerId(facts["peer"])] = Admitted(facts["stage"], at)
                if facts["voucher"] is not None:
                    held = self.vouchers[facts["voucher"]]
                    if facts["peer"] not in held.used_by:
                        self.vouchers[facts["voucher"]] = replace(held, used_by=(*held.used_by, facts["peer"]))
            case "forgotten":
                for peer in facts["peers"]:
                    self.peers.pop(PeerId(peer), None)
                    self.tickets.pop(PeerId(peer), None)
            case "result":
                self.versions[facts["stage"]] = max(self.versions[facts["stage"]], (facts["step"] + 1, facts["name"]))
                self._keep_recent(facts["stage"], facts["step"], facts["credit"])
                for peer, num_microbatches, num_tokens in facts["credit"]:
                    held_credit = self.credit.get(PeerId(peer), Credit())
                    self.credit[PeerId(peer)] = Credit(
                        held_credit.num_tokens + num_tokens,
                        held_credit.num_microbatches + num_microbatches,
                        held_credit.num_steps + 1,
                    )
            case "voucher":
                self.vouchers[facts["digest"]] = Voucher(facts["note"], facts["uses"], facts["expires_at"])
            case "voucher_revoked":
                self.vouchers[facts["digest"]] = replace(self.vouchers[facts["digest"]], revoked=True)
            case "ticket":
                self.tickets[PeerId(facts["value"]["peer_id"])] = facts
            case "ban" | "quarantine":
                self.verdicts.setdefault(PeerId(facts["value"]["peer_id"]), {})[kind] = facts
                self._refute(kind, facts["value"])
            case "pardon":
                self.verdicts.get(PeerId(facts["value"]["peer_id"]), {}).pop("quarantine", None)
            case "anchor":
                _keep(self.anchors.setdefault(facts["value"]["stage"], {}), facts["value"]["version"], facts)
            case "checkpoint":
                _keep(self.checkpoints, facts["value"]["version"], facts)
            case "scores":
                _keep(self.scores, facts["value"]["version"], facts)
            case "rollback":
                self.rollbacks.append((facts["to"], facts["version"]))
            case "ending":
                self.ending = facts
            case "amendment":
                self._amend(facts)
            case "evaluation":
                self.held_out[facts["version"]] = facts["held_out_loss"]

    def _amend(self, facts: Any) -> None:
        """The stages begin anew: whose they were is of no use any more, and their peers are admitted again."""
        self.amendments.append(facts)
        self.ending = None
        self.geneses.clear()
        self.versions.clear()
        self.anchors.clear()
        self.tickets.clear()
        if is_cut_anew(facts):
            self.peers = {peer: replace(one, stage=None) for peer, one in self.peers.items()}

    def _keep_recent(self, stage: int, step: int, credit: Any) -> None:
        self.recent_credit[stage, step] = [
            (PeerId(peer), num_microbatches, num_tokens) for peer, num_microbatches, num_tokens in credit
        ]
        for old in sorted(known for known in self.recent_credit if known[0] == stage)[:-KEPT_CREDIT]:
            del self.recent_credit[old]

    def _refute(self, kind: str, charge: Any) -> None:
        """Credit counts unrefuted work only: a ban takes all of it back, a fault that step's."""
        peer = PeerId(charge["peer_id"])
        held = self.credit.get(peer)
        if held is None:
            return
        if kind == "ban":
            del self.credit[peer]
            return
        if charge["kind"] != FAULT:
            return
        at = charge["stage"], charge["version"]
        refuted = [entry for entry in self.recent_credit.get(at, []) if entry[0] == peer]
        for _, num_microbatches, num_tokens in refuted:
            self.recent_credit[at].remove((peer, num_microbatches, num_tokens))
            held = Credit(held.num_tokens - num_tokens, held.num_microbatches - num_microbatches, held.num_steps - 1)
        self.credit[peer] = held

    def went_back_to(self, version: int) -> int:
        """The version whose state the stages have as that of `version`, where they begin or begin again."""
        return next((to for to, goes_on in self.rollbacks if goes_on == version), version)

    def is_abandoned(self, version: int) -> bool:
        """Whether the run was rolled back over the version."""
        return any(to < version < goes_on for to, goes_on in self.rollbacks)

    def is_shut_out(self, peer: PeerId) -> bool:
        return bool(self.verdicts.get(peer))

    def is_idle(self, peer: PeerId) -> bool:
        """Whether nothing is known of it but that it was admitted."""
        return peer not in self.credit and peer not in self.verdicts

    def leaders(self, count: int) -> list[tuple[PeerId, Credit]]:
        """Who has done most, without those who are shut out: what they are credited with is in doubt."""
        honest = [(peer, credit) for peer, credit in self.credit.items() if not self.is_shut_out(peer)]
        return sorted(honest, key=lambda entry: (-entry[1].num_tokens, entry[0]))[:count]

    def ranks(self) -> Mapping[PeerId, int]:
        """The place among all, from 1, of each who has credit and is not shut out."""
        if self._ranked[0] != self.num_events:
            leaders = self.leaders(len(self.credit))
            self._ranked = self.num_events, {peer: rank for rank, (peer, _) in enumerate(leaders, start=1)}
        return self._ranked[1]


def is_cut_anew(amendment: Value) -> bool:
    """Whether an amendment as it is written down makes other stages."""
    return CUT in Amendment.from_value(amendment).changed


def _keep(held: dict[int, Value], version: int, facts: Value) -> None:
    """The newest few."""
    held[version] = facts
    for old in sorted(held)[:-KEPT_SIGNED]:
        del held[old]
