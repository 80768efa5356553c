"""What peers report, added up by the host: figures for people, decided by nothing and deciding nothing."""

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from swarm.core.audit.honest_audits import AuditsMade
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.host_protocol import StepReport

RECENT_STEPS = 10
FAR_VERSIONS = 1024
"""So far beyond what is certified here a member's figures are kept: this host may have been away."""
HELD_SNAPSHOTS = 3
"""Snapshots a peer keeps."""


class VersionGone(TransientError):
    """No live peer holds the version any more."""


@dataclass
class PeerFigures:
    """What is known of one peer."""

    stage: int
    admitted_at: float
    last_heard: float
    last: StepReport | None = None
    left: bool = False
    is_member: bool = True
    """When it reported last."""


@dataclass
class StepFigures:
    """One step, over all stages."""

    loss_sum: float = 0.0
    num_targets: int = 0
    stale: int = 0
    counted: int = 0
    ids: dict[int, set[int]] = field(default_factory=dict)
    """Microbatches in each stage's roster."""
    peers: dict[int, tuple[PeerId, ...]] = field(default_factory=dict)
    """Whose work is in each stage's result."""
    tokens: int = 0
    departures: int = 0
    round_s: float = 0.0
    """Of the slowest stage."""
    round_bytes: int = 0
    """Sent by all peers."""
    overlap_sum: float = 0.0
    """Over the members that reported: share of its round in which each went on computing."""
    reported: set[PeerId] = field(default_factory=set)
    """Members whose figures are in here: each once, however often it is admitted again."""
    finished_at: float | None = None


@dataclass
class RunProgress:
    """The whole run so far."""

    num_stages: int
    first_version: int
    peers: dict[PeerId, PeerFigures] = field(default_factory=dict)
    steps: dict[int, StepFigures] = field(default_factory=lambda: defaultdict(StepFigures))
    digests: dict[int, dict[int, dict[PeerId, str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    """State digests by version, stage and member."""
    started_at: float | None = None
    tokens: int = 0
    """Trained on since the run began, or began again."""
    _done: int = 0
    """`done_versions` at the last look: it is looked at far more often than it moves."""

    def take(self, peer: PeerId, report: StepReport, *, is_member: bool) -> bool:
        """An admitted peer took a step; whether that is news. What it says of the step is added up from members only:
        anybody may be admitted.
        """
        figures = self.peers[peer]
        figures.last_heard, figures.left = time.time(), False
        if figures.last is not None and report.version <= figures.last.version:
            return False
        # Anybody may be admitted, and say long things: of a crowd what is short is kept.
        audits = report.audits if is_member else replace(report.audits, honest=())
        kept = replace(report, not_finite=(), audits=audits)
        figures.last, figures.is_member = kept, is_member
        if not is_member or report.version > self.done_versions() + FAR_VERSIONS:
            return True
        step = self.steps[report.version - 1]
        if peer in step.reported:
            return False
        step.reported.add(peer)
        step.loss_sum += report.loss_sum
        step.num_targets += report.num_targets
        step.stale += report.stale
        step.counted += report.counted
        step.round_s = max(step.round_s, report.round_s)
        step.round_bytes += report.round_bytes
        step.overlap_sum += report.overlap
        if report.state_digest:
            self.digests[report.version][report.stage][peer] = report.state_digest.hex()
        return True

    def has_answered(self, peer: PeerId) -> None:
        """An admitted peer is there, though it may take no step now."""
        figures = self.peers[peer]
        figures.last_heard, figures.left = time.time(), False

    def begin(self, first_version: int) -> None:
        """The run begins, or begins again, at this version."""
        self.steps.clear()
        self.digests.clear()
        self.tokens = self._done = 0
        self.first_version = first_version

    def take_result(self, facts: dict[str, Any], at: float) -> None:
        """A round's result as the ledger has it, written down at `at`."""
        step, stage = self.steps[int(facts["step"])], int(facts["stage"])
        step.ids[stage] = set(facts["ids"])
        step.peers[stage] = tuple(PeerId(peer) for peer, _, _ in facts["credit"])
        step.departures += len(facts["leaves"])
        if stage == 0:
            step.tokens = sum(num_tokens for _, _, num_tokens in facts["credit"])
            step.finished_at = at
            self.tokens += step.tokens

    def take_figures(self, facts: dict[str, Any]) -> None:
        """What an earlier process of this host knew of a step."""
        step = self.steps[int(facts["step"])]
        step.loss_sum, step.num_targets = float(facts["loss_sum"]), int(facts["num_targets"])
        step.stale, step.counted = int(facts["stale"]), int(facts["counted"])
        step.round_s, step.round_bytes = float(facts["round_s"]), int(facts["round_bytes"])

    def present(self, *, stage: int | None = None) -> list[PeerId]:
        """Peers that have not left, of one stage if it is given; sorted."""
        return sorted(
            peer for peer, figures in self.peers.items() if not figures.left and stage in (None, figures.stage)
        )

    def is_gone(self, stage: int, version: int, settings: RunSettings) -> bool:
        """Whether most live members of the stage are so far ahead that they do not hold the version any more, or began
        later. Who stays behind by its own word, or reports no more, has nobody wait for it."""
        if version < self.first_version:
            return True
        there = [self.peers[peer] for peer in self.present(stage=stage)]
        reports = [figures.last for figures in there if figures.is_member and figures.last is not None]
        return 2 * sum(oldest_held(report.version, settings) > version for report in reports) > len(reports)

    def done_versions(self) -> int:
        """The version that every stage has reached."""
        version = max(self._done, self.first_version)
        while version in self.steps and len(self.steps[version].ids) == self.num_stages:
            version += 1
        self._done = version
        return version

    def recent_tokens_per_s(self) -> float:
        """Over the last steps that have finished; 0 before the second."""
        last = [
            self.steps[n] for n in range(self.done_versions() - RECENT_STEPS, self.done_versions()) if n in self.steps
        ]
        recent = [(step.finished_at, step.tokens) for step in last if step.finished_at is not None]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return 0.0
        return sum(tokens for _, tokens in recent[1:]) / (recent[-1][0] - recent[0][0])

    def audits_made(self) -> list[AuditsMade]:
        """The newest word of each member on what its audits found honest, by peer."""
        members = [(peer, figures.last) for peer, figures in sorted(self.peers.items()) if figures.is_member]
        return [last.audits for _, last in members if last is not None]

    def microbatches_per_s(self, start: int, stop: int) -> float:
        """Certified, from the end of step `start` to the end of the last step before `stop`; 0 if not all are known."""
        steps = [self.steps[number] for number in range(start, stop) if number in self.steps]
        ends = [step.finished_at for step in steps if step.finished_at is not None]
        if len(ends) < max(2, stop - start) or ends[-1] <= ends[0]:
            return 0.0
        return sum(len(step.ids.get(0, ())) for step in steps[1:]) / (ends[-1] - ends[0])

    def longest_recent_step_s(self) -> float:
        """From one's end to the next's, of the last steps; infinite before the first has ended."""
        last = sorted(number for number, step in self.steps.items() if step.finished_at is not None)[-RECENT_STEPS:]
        ends = [self.steps[number].finished_at or 0.0 for number in last]
        if len(ends) < 2 and self.started_at is not None:
            ends = [self.started_at, *ends]
        return max((after - before for before, after in pairwise(ends)), default=math.inf)

    def last_loss(self) -> float | None:
        """Training loss, nats a token, of the last step that every source has had time to report; None before it."""
        done = self.done_versions()
        for number in range(done - 1, max(done - RECENT_STEPS, self.first_version) - 1, -1):
            step = self.steps.get(number)
            if step is not None and step.num_targets:
                return step.loss_sum / step.num_targets
        return None

    def seconds(self) -> float:
        """From the genesis to the last finished step."""
        ends = [step.finished_at for step in self.steps.values() if step.finished_at is not None]
        return max(ends) - self.started_at if ends and self.started_at is not None else 0.0

    def summary(self) -> dict[str, Any]:
        """Figures of the report."""
        steps = sorted(number for number, step in self.steps.items() if step.ids)
        counted = sum(step.counted for step in self.steps.values())
        seconds, tokens = self.seconds(), self.tokens
        last = self.last_common_digests()
        reports = sum(len(self.steps[number].reported) for number in steps)
        return {
            "steps": self.done_versions(),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds if seconds else 0.0,
            "stale_share": sum(step.stale for step in self.steps.values()) / counted if counted else 0.0,
            "round_seconds": [[number, self.steps[number].round_s] for number in steps],
            "round_bytes": [[number, self.steps[number].round_bytes] for number in steps],
            "overlap": sum(self.steps[number].overlap_sum for number in steps) / reports if reports else 0.0,
            "loss": [
                [number, self.steps[number].loss_sum / self.steps[number].num_targets]
                for number in steps
                if self.steps[number].num_targets
            ],
            "state_digests": {str(stage): dict(peers) for stage, peers in sorted(last.items())},
            "microbatches": {str(number): sorted(self.steps[number].ids.get(0, ())) for number in steps},
            "lost_microbatches": sum(len(self._only_downstream(self.steps[number])) for number in steps),
            "reassigned_microbatches": sum(p.last.reassigned for p in self.peers.values() if p.last),
            "lost_contributions": sum(self.steps[number].departures for number in steps),
            "wire_bytes": sum(p.last.sent_bytes for p in self.peers.values() if p.last),
            "screens": self.screens(),
            "peers": [
                {
                    "peer_id": peer,
                    "stage": figures.stage,
                    "microbatches": figures.last.microbatches if figures.last else 0,
                    "busy_s": figures.last.busy_s if figures.last else 0.0,
                    "left": figures.left,
                    "exit": None,
                }
                for peer, figures in sorted(self.peers.items())
            ],
        }

    def screens(self) -> dict[str, int]:
        """How often each kind of screen tripped, at all members together."""
        found: Counter[str] = Counter()
        for figures in self.peers.values():
            found.update(dict(figures.last.screens) if figures.last and figures.is_member else {})
        return dict(sorted(found.items()))

    def last_common_digests(self) -> dict[int, dict[PeerId, str]]:
        """Digests at the last version for which every stage reported one."""
        for version in sorted(self.digests, reverse=True):
            if len(self.digests[version]) == self.num_stages:
                return self.digests[version]
        return {}

    @staticmethod
    def _only_downstream(step: StepFigures) -> set[int]:
        """Microbatches that a later stage counted and the first did not: their work there was for nothing."""
        later = [ids for stage, ids in step.ids.items() if stage > 0]
        return set().union(*later) - step.ids.get(0, set()) if 0 in step.ids else set()


def oldest_held(version: int, settings: RunSettings) -> int:
    """The oldest version of which a peer that has come to this one keeps a snapshot, once its newest is on disk.

    It makes one of every few versions and of the run's last one. Only at the run's end is its newest not waited for:
    it comes no further then.
    """
    every, last = settings.checkpoint.snapshot_every, settings.optimizer.total_steps
    is_over = version >= last
    made = version if is_over else version - 1
    num_due = HELD_SNAPSHOTS - (is_over and last % every > 0)
    return (made // every - num_due + 1) * every
