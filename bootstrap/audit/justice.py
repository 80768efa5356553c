"""The host as judge: it anchors states, replays what a peer is accused of, and bans under the run key.

It also keeps out who owes too many audits.
"""

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bootstrap.audit.accusations import IncomingEvidence
from bootstrap.audit.beacon import HostBeacon
from bootstrap.audit.charges import OpenCharge, OpenCharges
from bootstrap.audit.evidence_past import EvidencePast, Gap, gap_in
from bootstrap.audit.newcomers import Newcomers
from bootstrap.audit.owed_audits import OwedAudits
from bootstrap.audit.pleas import Pleas
from bootstrap.audit.stated_states import StatedStates
from bootstrap.program.ledger import Ledger
from bootstrap.round.followed_stage import FollowedStage
from bootstrap.state.run_folder import PreparedRun
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value, digest, signed_bytes
from swarm.core.errors import DiskFullError, LocalError, RemoteError, TransientError
from swarm.core.fields import Fields, peer_item, value_or_none
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Charge, Result
from swarm.core.seats import seats, weight_of
from swarm.core.state.stage_chain import Genesis
from swarm.host_protocol import (
    ACCUSE,
    ANCHOR,
    BAN,
    DEBT,
    FINISH,
    MAX_ACCUSATION_PIECE_BYTES,
    MAX_BANS,
    PARDON,
    PLEA,
    PROMOTE,
    QUARANTINE,
    RETURN,
    WITHDRAWN,
    AccusationPiece,
)
from swarm.model.stack import stage_layout
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Message
from verification.audit.amplified import moved_bounds_in_force
from verification.audit.evidence import SUFFIX, Evidence, EvidenceHead
from verification.audit.owed import OwedAudit
from verification.audit.running_bias import RunningBiases
from verification.audit.standing import (
    FAULT,
    FAULT_VERSIONS,
    FAULTS_TO_STAY_OUT,
    AuditDebt,
    Standing,
    StandingTable,
)
from verification.audit.standing import Event as Certified
from verification.audit.strikes import Strikes
from verification.audit.tolerance import Grade
from verification.audit.verdicts import (
    Ban,
    Debt,
    Pardon,
    Promotion,
    Quarantine,
    jury_of,
)
from verification.kinds.bias import WITH_A_STATE, Bias
from verification.kinds.mismatch import charge_of
from verification.kinds.step_fraud import StepFraud
from verification.replay.evidence_file import evidence_in, largest_evidence_bytes
from verification.replay.judge import judge
from verification.replay.verdict import Verdict
from verification.state.anchor import Anchor
from verification.state.state_statement import StateStatement

log = logging.getLogger(__name__)

KEPT_ANCHORS = 6
MAX_WAITING, MAX_OF_STRANGERS = 32, 8
"""Accusations on disk that are not judged yet, one of an accuser; whoever brings one more is asked to come again."""
WITH_A_PAST = (*WITH_A_STATE, StepFraud.KIND)
"""Kinds of evidence that rest on one, which names the amendments that it is under."""
MAX_PLEADING = 8
"""Accused who are asked at a time to do their work again."""
TELL_S = 5.0

FOR_THE_QUARANTINED = frozenset({FINISH, PARDON, BAN, QUARANTINE, PLEA, RETURN})
"""What still passes between the host and a peer that is out, but not for ever."""


class Justice:
    """The run key's side of verification."""

    def __init__(
        self,
        run: PreparedRun,
        transport: GuardedTransport,
        ledger: Ledger,
        emit: Callable[[dict[str, Any]], None],
        peers: Callable[[], Iterable[PeerId]],
        followed: Mapping[int, FollowedStage],
        beacon: HostBeacon,
    ) -> None:
        """`peers` are those to tell of a verdict; `followed` the stages whose certified past is known here."""
        self._run = run
        self._transport = transport
        self._ledger = ledger
        self._emit = emit
        self._peers = peers
        self._followed = followed
        self._beacon = beacon
        self._folder, self._unjudged = run.folder.root / "evidence", run.folder.root / "unjudged"
        """Evidence of what was found, and what waits, named by who brought it."""
        self._left = sorted(self._unjudged.glob(f"*{SUFFIX}"))
        """What an earlier process of this host has not come to."""
        self._anchors = defaultdict[int, dict[int, Anchor]](dict)
        """Of each stage, by version."""
        self._tickets: dict[PeerId, Ticket] = {}
        self._waiting: dict[PeerId, Path] = {}
        """By accuser, what is not judged yet, the oldest first."""
        self._brought = asyncio.Event()
        self._pleading: dict[PeerId, list[Charge]] = {}
        """Who is to show that it had a fault, and what it is charged with."""
        self._pleas_at_once = asyncio.Semaphore(MAX_PLEADING)
        self._hearings: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        settings = run.settings
        bounds = moved_bounds_in_force(settings)
        self._biases = RunningBiases(run.run_key.sign(signed_bytes("bias-secret", [run.run_id])), bounds)
        self._num_values = [
            stage_layout(settings.model, stage).num_values for stage in range(settings.model.num_stages)
        ]
        past = EvidencePast(settings, transport, self._members_of)
        folder, largest_bytes = run.folder.root / "accusations", largest_evidence_bytes(settings)
        self._incoming = IncomingEvidence(folder, largest_bytes, past, self._gap_in, self._version)
        self._table = StandingTable(has_probation=run.settings.has_probation)
        self._unfolded: list[tuple[Certified, Version]] = []
        """What is certified and not in the table yet: a ledger's events are folded together, for each costs a copy."""
        self._strikes = Strikes()
        self._charges = OpenCharges(run.settings.checkpoint.snapshot_every)
        self._pardoned_at: dict[PeerId, int] = {}
        self.bans: dict[PeerId, Ban] = {}
        self.quarantines: dict[PeerId, Quarantine] = {}
        """Those in force."""
        self._founders: dict[StageIndex, frozenset[PeerId]] = {}
        self._juries: dict[PeerId, Quarantine] = {}
        """Of who is quarantined for what jurors found: their votes."""
        self._sent_back: dict[PeerId, Debt | Pardon] = {}
        """Of who is on probation again: the last word that says so."""
        self._pleas = Pleas(run.settings, run.run_id, transport, ledger, run.base)
        self._owed = OwedAudits(
            run,
            transport,
            self._tickets,
            followed,
            self._is_out,
            self._indebted,
        )
        self.stated = StatedStates(run, ledger, self._tickets, followed, self.anchor_what_is_agreed, self._unreliable)
        self.newcomers = Newcomers(
            run.settings, run.run_id, followed, self._tickets, beacon, lambda: self.table, self._promote, emit
        )
        kinds = (
            "amendment",
            "genesis",
            "anchor",
            "ban",
            "ticket",
            "forgotten",
            "debt",
            "strike",
            "quarantine",
            "pardon",
        )
        for event in ledger.events(*kinds, "promotion", "jury", "charge", "charge_over", "withdrawn"):
            self._remember(event.kind, event.facts)
        for peer in self.bans:  # it may have ended before it wrote that down
            self._is_judged(peer, [], is_true=True)

    @property
    def table(self) -> StandingTable:
        """Every peer's standing, of all that is certified by now."""
        if self._unfolded:
            self._table = self._table.after_all(self._unfolded)
            self._unfolded.clear()
        return self._table

    def _remember(self, kind: str, facts: Value) -> None:
        """What the ledger says, in its order."""
        match kind:
            case "genesis":  # states of what went before are none of this run any more
                genesis = Genesis.from_value(facts)
                self._anchors[genesis.stage].clear()
                self._begin_with(genesis.stage, genesis.members)
            case "amendment":  # whose steps it was about begin anew, with other draws
                self._anchors.clear()
                self._tickets.clear()
                self._charges = OpenCharges(self._run.settings.checkpoint.snapshot_every)
            case "anchor":
                anchor = Anchor.from_value(facts)
                self._keep(anchor)
                self._charges.was_anchored(anchor.stage, int(anchor.version))
            case "charge":
                self._charges.open(OpenCharge.from_value(facts))
            case "charge_over":
                fields = Fields("charge_over", facts)
                over = Charge.from_value(fields.message("charge"))
                self._charges.over([over], is_true=fields.boolean("is_true"))
            case "promotion":
                self._let_train(Promotion.from_value(facts))
            case "ticket":
                ticket = Ticket.from_value(facts)
                self._tickets[ticket.peer_id] = ticket
            case "forgotten":
                for peer in Fields("forgotten", facts).items("peers", peer_item, max_items=1 << 16):
                    self._tickets.pop(peer, None)
            case "ban":
                ban = Ban.from_value(facts)
                self.bans[ban.peer_id] = ban
                self._shut_out(ban)
            case "quarantine":
                quarantine = Quarantine.from_value(facts)
                self.quarantines[quarantine.peer_id] = quarantine
                self._shut_out(quarantine)
            case "jury":
                jury = Quarantine.from_value(facts)
                self._juries[jury.peer_id] = jury
            case "pardon":
                self._lift(Pardon.from_value(facts))
            case "debt":
                self._owe(Debt.from_value(Fields("debt event", facts).message("debt")))
            case "withdrawn":
                self.stated.remember(facts)
            case "strike":
                fields = Fields("strike", facts)
                accuser, version = fields.peer("peer_id"), Version(fields.integer("version"))
                self._strikes = self._strikes.after(accuser, version, fields.octets("evidence_digest", length=32))

    def _shut_out(self, verdict: Ban | Quarantine) -> None:
        self._count_out(verdict)
        self._close_door(verdict)

    def _count_out(self, verdict: Ban | Quarantine) -> None:
        self._unfolded.append((verdict, verdict.version))
        self.stated.forget(verdict.peer_id)

    def _is_out(self, peer: PeerId) -> bool:
        return peer in self.bans or peer in self.quarantines

    def _close_door(self, verdict: Ban | Quarantine) -> None:
        but = FOR_THE_QUARANTINED if isinstance(verdict, Quarantine) else frozenset[str]()
        self._transport.shut_out(verdict.peer_id, but=but)

    def serve(self) -> None:
        """Begin to answer."""
        self._transport.serve(ANCHOR, self._on_anchor, max_body_bytes=0)
        self._transport.serve(ACCUSE, self._on_accuse, max_body_bytes=MAX_ACCUSATION_PIECE_BYTES)
        self._transport.serve(QUARANTINE, self._on_quarantine, max_body_bytes=0)
        self._transport.serve(RETURN, self._on_return, max_body_bytes=0)
        self._beacon.serve(self._transport)
        self._owed.serve(self._transport)
        self.newcomers.serve(self._transport)
        self.stated.serve(self._transport)

    # -- admission ----------------------------------------------------------------------------------------

    def admit(self, peer: PeerId, stage: StageIndex, chain_end: bytes) -> Ticket:
        """The peer's ticket. Raises RemoteError if it has one with another hash chain: its draws would be two."""
        held = self._tickets.get(peer)
        if held is not None and held.chain_end != chain_end:
            raise RemoteError("standing", f"{peer} was admitted with another hash chain; use a new identity", peer)
        if held is None or held.stage != stage:
            amendments = len(self._run.signed.amendments)
            held = Ticket(self._run.run_id, peer, stage, chain_end, amendments).signed_by(self._run.run_key)
            self._tickets[peer] = held
            self._ledger.append("ticket", held.to_value())
        self._owed.admitted(peer, self._version(stage))
        return held

    def was_member(self, peer: PeerId) -> bool:
        """Whether the peer ever was past its probation; in a run without one, whether it has founded a stage."""
        return peer in self.table.founders or (self._run.settings.has_probation and self.table.was_member(peer))

    def is_bound(self, peer: PeerId) -> bool:
        """Whether the peer was let in by strangers, and so has its stage of the run key: members among friends, and who
        has yet to be examined, go where they like."""
        return self._run.settings.has_probation and self.table.was_member(peer)

    @property
    def has_members(self) -> bool:
        """Whether the stages have begun, in a run of strangers."""
        return self._run.settings.has_probation and bool(self.table.founders)

    def forget(self, peer: PeerId) -> None:
        """It was admitted, and has done nothing."""
        self._tickets.pop(peer, None)

    def _version(self, stage: StageIndex) -> Version:
        """Of the stage, as far as its certified results are here."""
        followed = self._followed.get(stage)
        return followed.version if followed is not None else Version(self._run.version)

    # -- anchors ------------------------------------------------------------------------------------------

    def anchor_genesis(self, stage: StageIndex, followed: FollowedStage, state_digest: bytes) -> None:
        """The state a stage begins at, or begins again, and who is a member from the start."""
        self._begin_with(stage, followed.chain.members)
        self._anchors[stage].clear()
        self._anchor(Anchor.of_chain(followed.chain, state_digest))

    def anchor_what_is_agreed(self, stage: StageIndex) -> None:
        """Anchor each version of which more than two thirds of its members, by their votes' weight, state one digest.

        Members do not count who are shut out, or who have found themselves broken and taken back what they stated.
        """
        followed = self._followed.get(stage)
        for version in self.stated.versions(stage):
            chain = followed.at(version) if followed is not None else None
            if chain is None or version in self._anchors[stage]:
                continue
            out = self.bans.keys() | self.quarantines.keys()
            work = {
                peer: done
                for peer, done in chain.basis.work_of.items()
                if peer not in out and not self.stated.has_withdrawn(peer, version)
            }
            weights, digests = seats(work), self.stated.digests(stage, version, chain.name)
            for found in sorted({digests[peer] for peer in weights if peer in digests}):
                agreed = weight_of(weights, [peer for peer in weights if digests.get(peer) == found])
                if 3 * agreed > 2 * sum(weights.values()):
                    self._anchor(Anchor.of_chain(chain, found))

    def anchor_of(self, stage: int, version: int) -> Anchor | None:
        """None if there is none yet, or none any more."""
        return self._anchors[stage].get(version)

    def anchored_versions(self, stage: int) -> list[int]:
        """Those that are still known, sorted."""
        return sorted(self._anchors[stage])

    def _anchor(self, anchor: Anchor) -> None:
        signed = anchor.signed_by(self._run.run_key)
        self._ledger.append("anchor", signed.to_value())
        self._keep(signed)
        lapsed = self._charges.anchored(signed.stage, int(signed.version))
        self._are_over([one.charge for one in lapsed], is_true=False)
        if lapsed:
            _begin(self._hearings, self._lapse(lapsed))

    def _keep(self, anchor: Anchor) -> None:
        held = self._anchors[anchor.stage]
        held[int(anchor.version)] = anchor
        for old in sorted(held)[:-KEPT_ANCHORS]:
            del held[old]

    async def _on_anchor(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("anchor request", request.meta)
        stage, version = fields.integer("stage", high=len(self._num_values) - 1), fields.integer("version")
        fields.done()
        held = self._anchors[stage]
        found = max((number for number in held if number <= version), default=None)
        if found is None:
            raise TransientError(f"no state of stage {stage} up to version {version} is anchored here")
        return Message({"anchor": held[found].to_value()})

    # -- charges ------------------------------------------------------------------------------------------

    def certified(self, result: Result) -> None:
        """A round is over: who brought charges in it owes their cases."""
        if self._run.settings.replays:
            for charge in self._charges.certified(result):
                self._ledger.append("charge", charge.to_value())
                if charge.accused in self.bans:  # by another's case, while this one waited for its round
                    self._is_judged(charge.accused, [charge.charge], is_true=True)

    def _is_judged(self, accused: PeerId, charges: Sequence[Charge], *, is_true: bool) -> None:
        self._are_over(self._charges.judged(accused, charges, is_true=is_true), is_true=is_true)

    def _are_over(self, charges: Iterable[Charge], *, is_true: bool) -> None:
        for charge in charges:
            self._ledger.append("charge_over", {"charge": charge.to_value(), "is_true": is_true})

    async def _lapse(self, lapsed: Sequence[OpenCharge]) -> None:
        """Nobody has shown what these were about: that was untrue, and so was what jurors found."""
        for charge in lapsed:
            self._emit({"event": "lapsed", "accuser": charge.accuser, "peer_id": charge.accused, "step": charge.step})
            await self._strike(charge.accuser, charge.digest)
            await self._overrule(charge.charge)

    async def _overrule(self, charge: Charge) -> None:
        """The charge was untrue: so was the word of jurors who convicted by it."""
        jury = self._jury_that_keeps_out(charge.accused)
        if jury is None or jury.accusation.digest() != charge.digest:
            return
        for vote in jury.votes:
            if vote.verdict is Grade.FRAUD:
                await self._strike(vote.juror, charge.digest)
        await self.pardon(charge.accused, acquitted=True)

    def _jury_that_keeps_out(self, peer: PeerId) -> Quarantine | None:
        held, jury = self.quarantines.get(peer), self._juries.get(peer)
        is_by_jurors = held is not None and jury is not None and held.accusation == jury.accusation
        return jury if is_by_jurors else None

    async def _overrule_what_was_untrue(self) -> None:
        """What an earlier process of this host has not come to."""
        for jury in [*self._juries.values()]:
            charge = Charge(jury.peer_id, jury.accusation.digest())
            if self._charges.was_untrue(charge):
                await self._overrule(charge)

    # -- accusations --------------------------------------------------------------------------------------

    async def _on_accuse(self, sender: PeerId, request: Message) -> Message:
        if sender not in self._tickets:
            raise RemoteError("standing", f"{sender} is not admitted", sender)
        piece = AccusationPiece.from_value(request.meta)
        if piece.accused in self.bans:
            self._incoming.drop(sender, piece.digest)
            return Message({"next": piece.size, "again_s": 0.0})
        self._charges.comes(piece.accused)
        self._check_room(sender)
        is_member = self.may_train(sender)
        taken = await self._incoming.take(sender, piece, request.body, is_member=is_member)
        if taken.path is not None:
            try:
                await self._file(sender, taken.path)
            finally:
                await asyncio.to_thread(taken.path.unlink, missing_ok=True)
        return Message({"next": taken.next, "again_s": taken.again_s})

    def _members_of(self, stage: StageIndex) -> list[PeerId]:
        """Who holds its past, and is not out."""
        followed = self._followed.get(stage)
        return [peer for peer in followed.chain.members if not self._is_out(peer)] if followed is not None else []

    def _gap_in(self, head: EvidenceHead, start: int) -> Gap | None:
        """Raises RemoteError or TransientError if the whole file would be refused."""
        self._check_belongs(head)
        return None if head.accused in self.bans else gap_in(head, start, self._anchors.get(head.stage, {}).get)

    async def _file(self, sender: PeerId, path: Path) -> None:
        """Have evidence that is all here judged. Raises RemoteError for what is none, TransientError if too much is."""
        evidence = await asyncio.to_thread(evidence_in, path)
        self._check_belongs(evidence)
        if evidence.accused in self.bans:
            return
        digest = await asyncio.to_thread(evidence.digest)
        if self._strikes.has(sender, digest):
            raise RemoteError("evidence", "this was judged already, and was untrue", sender)
        name = f"{evidence.kind}-{evidence.accused[-8:]}-{digest.hex()[:16]}{SUFFIX}"
        # Two auditors that found the same may bring it in the same moment: nothing is awaited from here on.
        if (self._folder / name).exists() or any(self._unjudged.glob(f"*-{name}")):
            return
        self._check_room(sender)
        self._unjudged.mkdir(parents=True, exist_ok=True)
        waiting = self._unjudged / f"{sender}-{name}"
        os.replace(path, waiting)
        self._waiting[sender] = waiting
        self._brought.set()

    def _check_belongs(self, evidence: Evidence | EvidenceHead) -> None:
        """Raises RemoteError for what is no evidence of this run, TransientError if it comes too early."""
        run, version = evidence.run, int(evidence.version)
        if run.run_id != self._run.run_id:
            raise RemoteError("evidence", f"evidence of run {run.run_id[:12]}, not of this one")
        if not run.could_be_of(version, self._run.signed, shows_era=evidence.kind in WITH_A_PAST):
            raise RemoteError("evidence", f"{len(run.amendments)} amendments were not in force at version {version}")
        if evidence.accused in self.bans:
            return
        if version > (now := self._version(evidence.stage)) + 1:  # what is certified of it is not here yet
            raise TransientError(f"evidence of version {version}; stage {evidence.stage} is at {now} here")
        self._check_not_withdrawn(evidence)

    def _check_room(self, accuser: PeerId) -> None:
        """Raises TransientError while no more can wait."""
        if accuser in self._waiting:
            raise TransientError("another accusation of yours is waiting to be judged")
        is_member = self.may_train(accuser)
        strangers = sum(not self.may_train(peer) for peer in self._waiting)
        if len(self._waiting) - strangers >= MAX_WAITING if is_member else strangers >= MAX_OF_STRANGERS:
            raise TransientError(f"{len(self._waiting)} accusations are waiting to be judged")

    async def run(self) -> None:
        """Judge what is brought, one after another, for ever."""
        try:
            await self._overrule_what_was_untrue()
            while self._left:
                path = self._left.pop()
                accuser = PeerId(path.name.partition("-")[0])
                await self._dismissing(accuser, path, self._judge(accuser, path))
            while True:
                self._brought.clear()
                while self._waiting:  # members first: whoever likes has keys that bring cases
                    accuser = min(self._waiting, key=lambda peer: not self.may_train(peer))
                    path = self._waiting[accuser]
                    await self._dismissing(accuser, path, self._judge(accuser, path))
                    del self._waiting[accuser]
                await self._brought.wait()
        finally:
            self._incoming.close()
            for task in self._hearings:
                task.cancel()
            await self.told()

    async def told(self) -> None:
        """Until everyone has been told what was said so far, or has not answered in `TELL_S`."""
        while self._telling:
            await asyncio.wait(self._telling)

    async def _dismissing(self, accuser: PeerId, path: Path, judging: Coroutine[Any, Any, None]) -> None:
        try:
            await judging
        except DiskFullError:
            log.error("%s is judged once there is room on the disk", path.name)
        except Exception as error:
            # Evidence is a stranger's: a case that the judge breaks on costs that case, and not the host.
            if not isinstance(error, RemoteError | LocalError):
                log.exception("the judge breaks on %s", path)
            await asyncio.to_thread(path.unlink, missing_ok=True)
            self._emit({"event": "dismissed", "accuser": accuser, "reason": str(error)})

    async def _judge(self, accuser: PeerId, path: Path) -> None:
        evidence = await asyncio.to_thread(evidence_in, path)
        ban = self.bans.get(evidence.accused)
        if ban is not None and ban.evidence_digest == await asyncio.to_thread(evidence.digest):
            self._kept(path)  # an earlier process has not come to that
            return
        if ban is not None:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            return
        self._check_not_withdrawn(evidence)
        verdict = await asyncio.to_thread(
            judge,
            evidence,
            run_key=self._run.run_key.peer_id,
            data=self._run.data.train_path,
            base=self._run.base,
            bias_seed=self._biases.seed_for(evidence.accused),
        )
        log.info("%s accused of %s by %s: %s", evidence.accused, evidence.kind, accuser, verdict.reason)
        charge = await asyncio.to_thread(charge_of, evidence)
        charges = [charge] if charge is not None else []
        if not verdict.guilty:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            self._is_judged(evidence.accused, charges, is_true=False)
            if evidence.kind == Bias.KIND and self._adds_up(accuser, evidence, verdict):
                return
            self._emit(
                {"event": "acquitted", "accuser": accuser, "peer_id": evidence.accused, "reason": verdict.reason}
            )
            await self._strike(accuser, evidence.digest())
            if charge is not None:
                await self._overrule(charge)
            return
        if not self._pleas.may_be_fault(evidence, verdict):
            self._ban(accuser, evidence, path, charges, verdict.reason)
        elif evidence.accused in self._pleading:  # what it has to say of the first goes for all
            self._pleading[evidence.accused] += charges
            await asyncio.to_thread(path.unlink, missing_ok=True)
        else:
            # Others' cases do not wait for what the accused has to say.
            self._pleading[evidence.accused] = charges
            hearing = self._hear(accuser, evidence, path, verdict.reason)
            _begin(self._hearings, self._dismissing(accuser, path, hearing))

    def _adds_up(self, accuser: PeerId, evidence: Evidence, verdict: Verdict) -> bool:
        """Whether a contribution is off far enough to be counted; who is led one way by all of them is kept out."""
        moved = verdict.amplified
        if evidence.run.amendments != self._run.signed.amendments:  # its values were others' parameters, perhaps
            return False
        if moved is None or moved.sketch is None or moved.measured <= self._biases.bounds.bias:
            return False
        peer, stage, num_values = evidence.accused, evidence.stage, self._num_values[evidence.stage]
        held = self._biases.after(peer, Step(int(evidence.version)), moved.sketch, num_values=num_values)
        share, num_audits = round(held.share, 3), held.num_audits
        self._emit(
            {"event": "leaning", "peer_id": peer, "accuser": accuser, "share_of_law": share, "replays": num_audits}
        )
        if held.is_led:
            reason = f"{num_audits} contributions lead one way, {share} of what chance allows"
            self._biases.forget(peer)
            self._keep_out(peer, stage, Version(evidence.version), Bias.KIND, evidence.digest(), reason)
        return True

    async def _hear(self, accuser: PeerId, evidence: Evidence, path: Path, reason: str) -> None:
        """Guilty of little: the accused may show that it is right when it does it again."""
        try:
            async with self._pleas_at_once:
                is_fault = await self._pleas.is_fault(evidence)
        finally:
            charges = self._pleading.pop(evidence.accused)
        if is_fault:
            self._fault(evidence, path, charges)
        else:
            self._ban(accuser, evidence, path, charges, reason)

    def _kept(self, path: Path) -> Path:
        """Where evidence that is judged is from now on."""
        kept = self._folder / path.name.partition("-")[2]
        self._folder.mkdir(parents=True, exist_ok=True)
        os.replace(path, kept)
        return kept

    def _ban(self, accuser: PeerId, evidence: Evidence, path: Path, charges: Sequence[Charge], reason: str) -> None:
        if evidence.accused in self.bans:  # while this case was replayed, a hearing of another one ended
            path.unlink(missing_ok=True)
            return
        ban = Ban(
            self._run.run_id,
            evidence.accused,
            evidence.stage,
            Version(evidence.version),
            evidence.kind,
            evidence.digest(),
        ).signed_by(self._run.run_key)
        with self._ledger.together():
            self._ledger.append("ban", ban.to_value())
            self._is_judged(ban.peer_id, charges, is_true=True)
        self.bans[ban.peer_id] = ban
        self._incoming.drop_about(ban.peer_id)
        self._emit(
            {
                "event": "banned",
                "peer_id": ban.peer_id,
                "stage": ban.stage,
                "kind": ban.kind,
                "step": ban.version,
                "evidence": str(self._kept(path)),
                "accuser": accuser,
                "reason": reason,
            }
        )
        self._shut_out_and_tell(BAN, "ban", ban)

    def _check_not_withdrawn(self, evidence: Evidence | EvidenceHead) -> None:
        """Raises RemoteError if the accused has found its own fault, and taken back what it is accused of."""
        accused, version = evidence.accused, int(evidence.version)
        if evidence.kind == StepFraud.KIND and self.stated.has_withdrawn(accused, version):
            raise RemoteError(WITHDRAWN, f"{accused} has taken back what it stated up to version {version}, or later")

    async def _unreliable(self, statement: StateStatement) -> None:
        """A machine that breaks again and again, or a liar that takes back what it is about to be accused of."""
        reason = f"{FAULTS_TO_STAY_OUT} states it stated in {FAULT_VERSIONS} versions were wrong, as it says itself"
        found = digest("state", statement.to_value())
        self._keep_out(statement.peer_id, statement.stage, statement.version, "withdrawals", found, reason)

    # -- faults -------------------------------------------------------------------------------------------

    def _fault(self, evidence: Evidence, path: Path, charges: Sequence[Charge]) -> None:
        """Out until it has mended itself, and for good if it happens too often. What came before is the same fault."""
        peer, version = evidence.accused, Version(evidence.version)
        is_out = peer in self.quarantines and self._jury_that_keeps_out(peer) is None
        self._is_judged(peer, charges, is_true=True)
        if version <= self.table.on_probation_since(peer) or is_out:
            raise RemoteError("standing", f"{peer} is out, or has begun again, for a fault that it had by {version}")
        self.quarantines.pop(peer, None)  # what jurors found is judged
        self._juries.pop(peer, None)
        reason = "its work was wrong, and is right when it does it again"
        self._keep_out(peer, evidence.stage, version, FAULT, evidence.digest(), reason)
        self._kept(path)

    async def _on_return(self, sender: PeerId, request: Message) -> Message:
        """A peer with a fault has tested itself, and begins again."""
        if sender not in self.quarantines or not self.table.may_return(sender):
            raise RemoteError(
                "standing", f"{sender} is not out for a fault, or had {FAULTS_TO_STAY_OUT} in {FAULT_VERSIONS} versions"
            )
        return Message({"pardon": (await self.pardon(sender, acquitted=False)).to_value()})

    async def _on_quarantine(self, sender: PeerId, request: Message) -> Message:
        """Jurors have found a peer guilty: it is out until its case is judged here."""
        fields = Fields("quarantine call", request.meta)
        found = Quarantine.from_value(fields.message("quarantine"))
        fields.done()
        followed = self._followed.get(found.stage)
        accuser, step = found.summons
        result = followed.result(int(step)) if followed is not None else None
        after = followed.chain_at(int(step) + 1) if followed is not None else None
        if result is None or after is None:
            raise TransientError(f"the result of step {step} of stage {found.stage} is not known here")
        jury = jury_of(result, after.basis, found.accusation, accuser, self._beacon.of)
        await asyncio.to_thread(found.check, self._run.run_id, self._run.run_key.peer_id, jury=jury)
        charge = Charge(found.peer_id, found.accusation.digest())
        if int(found.version) <= self._pardoned_at.get(found.peer_id, -1):  # all count it so
            raise RemoteError("verdict", f"{found.peer_id} has been let in again since", accuser)
        if self._charges.is_over(charge):
            await self._contradict(found, charge)
            raise RemoteError("verdict", f"the charge against {found.peer_id} is judged, or has lapsed", accuser)
        if not self._is_out(found.peer_id):
            self._keep_out_by_jury(found)
        return Message()

    async def _contradict(self, found: Quarantine, charge: Charge) -> None:
        """What jurors find was found untrue here before: their stage acts on their word until it hears that."""
        if self._charges.was_untrue(charge) and not self._is_out(found.peer_id):
            self._keep_out_by_jury(found)
            await self._overrule(charge)

    def _keep_out_by_jury(self, found: Quarantine) -> None:
        self._ledger.append("jury", found.to_value())
        self._juries[found.peer_id] = found
        reason = f"{len(found.votes)} jurors were asked, and found it guilty"
        self._keep_out(found.peer_id, found.stage, found.version, found.kind, found.evidence_digest, reason)

    async def _strike(self, accuser: PeerId, found: bytes) -> None:
        """Its word on another was untrue, by this evidence or charge."""
        if accuser not in self._tickets:
            return
        stage = self._tickets[accuser].stage
        version = self._version(stage)
        self._ledger.append("strike", {"peer_id": accuser, "version": version, "evidence_digest": found})
        self._strikes = self._strikes.after(accuser, version, found)
        if self._strikes.are_too_many(accuser, pardoned_at=self._pardoned_at.get(accuser, -1)):
            reason = "its accusations were untrue, three in 100 versions"
            self._keep_out(accuser, stage, version, "false_accusation", found, reason)

    # -- debts --------------------------------------------------------------------------------------------

    async def _indebted(self, owed: OwedAudit, reason: str) -> None:
        peer, version = owed.target, Version(int(owed.step))
        if peer in self.quarantines:
            return
        log.info("%s owes %s %d of step %d to %s: %s", peer, owed.what, owed.number, version, owed.auditor, reason)
        await self.send_back(peer, version, owed.to_value())
        if self.table.standing(peer, version) is Standing.QUARANTINED:
            found = digest("owed-audit", owed.to_value())
            reason = f"three audits in 100 versions were not served, to the host neither; the last: {reason}"
            self._keep_out(peer, owed.stage, self._version(owed.stage), "withholding", found, reason)

    async def send_back(self, peer: PeerId, version: Version, owed: Value) -> None:
        """The peer has a debt of that version: it is on probation again."""
        debt = Debt(self._run.run_id, peer, version).signed_by(self._run.run_key)
        self._ledger.append("debt", {"debt": debt.to_value(), "owed": owed})
        self._owe(debt)
        self._tell(DEBT, "debt", debt)

    def _owe(self, debt: Debt) -> None:
        self._unfolded.append((AuditDebt(debt.peer_id, debt.version), debt.version))
        self._sent_back[debt.peer_id] = debt

    # -- probation ----------------------------------------------------------------------------------------

    def _begin_with(self, stage: StageIndex, members: Iterable[PeerId]) -> None:
        """The stage begins, or begins again: peers know the founders of its last genesis only."""
        self._founders[stage] = frozenset(members)
        self._table = replace(self._table, founders=frozenset().union(*self._founders.values()))

    async def _promote(self, peer: PeerId, stage: StageIndex, version: Version) -> Promotion:
        """The peer may train from now on."""
        made = Promotion(self._run.run_id, peer, stage, version).signed_by(self._run.run_key)
        self._ledger.append("promotion", made.to_value())
        self._let_train(made)
        self._tell(PROMOTE, "promotion", made)
        return made

    def _let_train(self, promotion: Promotion) -> None:
        self._unfolded.append((promotion, promotion.version))
        self.newcomers.remember(promotion)
        self._sent_back.pop(promotion.peer_id, None)

    def may_train(self, peer: PeerId) -> bool:
        """Whether anybody takes anything from the peer but its replays."""
        return self.table.may_train(peer)

    def _shown_promotion(self, peer: PeerId) -> Promotion | None:
        """A founder gets one too: in another stage than it has founded nobody knows it."""
        held, ticket = self.newcomers.promotion_of(peer), self._tickets.get(peer)
        if held is not None or ticket is None or peer not in self.table.founders or not self.may_train(peer):
            return held
        return Promotion(self._run.run_id, peer, ticket.stage, self._version(ticket.stage)).signed_by(self._run.run_key)

    def papers_for(self, peer: PeerId) -> dict[str, Value]:
        """What a peer that is admitted must know of the others, and may show of itself."""
        sent_back = list(self._sent_back.values())
        return {
            "promotion": value_or_none(self._shown_promotion(peer)),
            "bans": self._worth_knowing(self.bans.values()),
            "quarantines": self._worth_knowing(self.quarantines.values()),
            "pardons": self._worth_knowing(word for word in sent_back if isinstance(word, Pardon)),
            "debts": self._worth_knowing(word for word in sent_back if isinstance(word, Debt)),
        }

    def _worth_knowing(self, words: Iterable[Ban | Quarantine | Pardon | Debt]) -> list[Value]:
        """The newest of those who were members once: who never was is nobody, with or without a ban."""
        table = self.table
        known = [word for word in words if table.was_member(word.peer_id)]
        return [word.to_value() for word in known[-MAX_BANS:]]

    # -- kept out -----------------------------------------------------------------------------------------

    def _keep_out(
        self, peer: PeerId, stage: StageIndex, version: Version, kind: str, evidence_digest: bytes, reason: str
    ) -> None:
        """Quarantine: until the run key pardons."""
        if peer in self.quarantines or peer in self.bans:
            return
        made = Quarantine(self._run.run_id, peer, stage, version, kind, evidence_digest).signed_by(self._run.run_key)
        self._ledger.append("quarantine", made.to_value())
        self.quarantines[peer] = made
        self._emit(
            {
                "event": "quarantined",
                "peer_id": peer,
                "stage": stage,
                "kind": kind,
                "step": version,
                "reason": reason,
            }
        )
        self._shut_out_and_tell(QUARANTINE, "quarantine", made)

    async def pardon(self, peer: PeerId, *, acquitted: bool) -> Pardon:
        """End a quarantine; `acquitted` as in `Pardon`. A ban stays. Raises LocalError if the peer is not in one."""
        held = self.quarantines.get(peer)
        if held is None:
            raise LocalError(f"{peer} is not quarantined")
        version = max(held.version, self._version(held.stage))
        made = Pardon(self._run.run_id, peer, version, acquitted).signed_by(self._run.run_key)
        self._ledger.append("pardon", made.to_value())
        self._lift(made)
        self._emit({"event": "pardoned", "peer_id": peer, "stage": held.stage, "step": version})
        self._tell(PARDON, "pardon", made)
        return made

    def _lift(self, pardon: Pardon) -> None:
        self._unfolded.append((pardon, pardon.version))
        if not pardon.acquitted:
            self._sent_back[pardon.peer_id] = pardon
        self._pardoned_at[pardon.peer_id] = int(pardon.version)
        self.quarantines.pop(pardon.peer_id, None)
        self._juries.pop(pardon.peer_id, None)
        if pardon.peer_id not in self.bans:
            self._transport.let_in(pardon.peer_id)

    def _shut_out_and_tell(self, method: str, name: str, verdict: Ban | Quarantine) -> None:
        """All count it from now on; it hears of it itself, and then nothing more."""
        self._count_out(verdict)

        async def tell() -> None:
            await self._say(method, name, verdict, [verdict.peer_id])
            if self._is_out(verdict.peer_id):
                self._close_door(verdict)

        _begin(self._telling, tell())
        _begin(self._telling, self._say(method, name, verdict, {*self._peers()} - {verdict.peer_id}))

    def _tell(self, method: str, name: str, word: Pardon | Promotion | Debt) -> None:
        """Everyone, and the peer it is about too; whoever judges does not wait for it."""
        _begin(self._telling, self._say(method, name, word, {*self._peers(), word.peer_id}))

    async def _say(
        self, method: str, name: str, word: Ban | Quarantine | Pardon | Promotion | Debt, to: Iterable[PeerId]
    ) -> None:
        async def tell(peer: PeerId) -> None:
            with contextlib.suppress(TransientError, RemoteError):
                await self._transport.call(
                    peer, method, Message({name: word.to_value()}), timeout_s=TELL_S, max_body_bytes=0
                )

        await asyncio.gather(*(tell(peer) for peer in sorted(to)))


def _begin(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Have it done, and held until it is."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
