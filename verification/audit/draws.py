"""Who audits whom, and what: chance that nobody can know before the target has committed.

Each auditor commits the end of a hash chain when it is admitted, and reveals one value a version. Its draw on a
contribution hashes the value of that version with the contribution's digest; the value is revealed two versions later.
So nobody else can know the draw when the contribution is signed, the auditor cannot choose it, and all can check it.

With h honest auditors at rate q, a version's lie is found with p = 1 - (1 - q)^h: time to ban is geometric in p.
"""

import math
from dataclasses import dataclass

from swarm.core.audit.recomputed import audits_of_a_part
from swarm.core.canonical import digest
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.settings import AuditSettings


@dataclass(frozen=True)
class Draw:
    """What chance says of one auditor and one contribution (or other signed claim of the target)."""

    auditor: PeerId
    target: PeerId
    value: bytes

    def hits_hop(self, rate: float) -> bool:
        """Whether the auditor replays the microbatch, where the draw is a `hop_draw`."""
        return self._hits("hop", rate)

    def hits_contribution(self, rate: float) -> bool:
        """Whether the auditor replays the whole contribution."""
        return self._hits("contribution", rate)

    def hits_part(self, part: int, rate: float) -> bool:
        """Whether the auditor recomputes this part, where the target is its reducer and signed it."""
        return self._hits(f"part/{part}", rate)

    def _hits(self, purpose: str, rate: float) -> bool:
        # The product with a power of two is exact: all agree, and a rate of 1 always hits.
        return int.from_bytes(digest(f"draw/{purpose}", self.value)[:8], "big") < int(rate * 2**64)


def draw(chain_value: bytes, contribution_digest: bytes, *, auditor: PeerId, target: PeerId) -> Draw:
    """The auditor's draw on a contribution, from its chain's value at the version the contribution starts from.

    The auditor's name is hashed too: who commits another's chain end as his own gets other draws.
    """
    return Draw(auditor, target, digest("draw", [chain_value, contribution_digest, auditor, target]))


def hop_draw(chain_value: bytes, microbatch_id: MicrobatchId, *, auditor: PeerId, target: PeerId) -> Draw:
    """The auditor's draw on what a target sent on and sent back of one microbatch, from its chain's value at the
    version of the microbatch's step.

    It does not depend on what the target lists: what it leaves out of its contribution is drawn like the rest.
    """
    return Draw(auditor, target, digest("draw-hop", [chain_value, microbatch_id, auditor, target]))


@dataclass(frozen=True, kw_only=True)
class AuditBudget:
    """What is spent on auditing one target in a version, by all its auditors together."""

    hop: float = 0.08
    """Of the compute that the target's own work took."""
    contribution: float = 0.07
    """Of the compute that the target's own work took."""
    reducer: float = 0.05
    """Audits of each part it reduced, where a stage has many; more where it has few (`swarm.core.audit.recomputed`)."""

    @classmethod
    def of_run(cls, audits: AuditSettings) -> "AuditBudget":
        """What the run's manifest allows."""
        return cls(hop=audits.hop_budget, contribution=audits.contribution_budget, reducer=audits.reducer_share)

    def __post_init__(self) -> None:
        for name, value in (
            ("hop", self.hop),
            ("contribution", self.contribution),
            ("reducer", self.reducer),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"audit budget {name} is {value}; it must be 0 or more")


DEFAULT_BUDGET = AuditBudget()


def microbatch_rate(num_replicas: int, budget: AuditBudget = DEFAULT_BUDGET, *, factor: float = 1.0) -> float:
    """Chance that one auditor replays what a target did of one microbatch.

    `factor` raises the budget for a target of doubtful standing (`StandingTable.budget_factor`).
    """
    return _rate(budget.hop * factor, num_replicas)


def contribution_rate(num_replicas: int, budget: AuditBudget = DEFAULT_BUDGET, *, factor: float = 1.0) -> float:
    """Chance that one auditor replays a whole contribution."""
    return _rate(budget.contribution * factor, num_replicas)


def reducer_rate(
    num_replicas: int, budget: AuditBudget = DEFAULT_BUDGET, *, num_parts: int, factor: float = 1.0
) -> float:
    """Chance that one auditor recomputes one reduced part of a result that has so many."""
    return _rate(audits_of_a_part(budget.reducer, num_parts) * factor, num_replicas)


def found_by_one(
    hop: float, contribution: float, num_microbatches: int, *, in_hops: float = 1.0, in_contributions: float = 1.0
) -> float:
    """Chance that one auditor finds a lie in a version, from its chance to replay each of the target's microbatches and
    the whole contribution, each drawn by itself: the `rate` of the three functions below.

    `in_hops` is the share of microbatches, `in_contributions` that of contributions, of which a replay shows the lie.
    """
    missed_in_hops = (1.0 - hop * in_hops) ** num_microbatches
    return 1.0 - missed_in_hops * (1.0 - contribution * in_contributions)


def detection(rate: float, num_honest_auditors: int) -> float:
    """Chance that a lie in every version is found in a given one: p = 1 - (1 - q)^h."""
    return 1.0 - (1.0 - rate) ** num_honest_auditors


def expected_time_to_ban(rate: float, num_honest_auditors: int) -> float:
    """Mean number of versions until a lie in every version is found, 1 / p; infinite where nobody looks."""
    found = detection(rate, num_honest_auditors)
    return 1.0 / found if found > 0 else math.inf


def bound_99(rate: float, num_honest_auditors: int) -> float:
    """Least number of versions within which 99 % of such liars are found; infinite where nobody looks."""
    missed = 1.0 - detection(rate, num_honest_auditors)
    if missed >= 1.0:
        return math.inf
    if missed <= 0.01:
        return 1.0
    return float(math.ceil(math.log(0.01) / math.log(missed) - 1e-9))  # 1e-9: (0.1)^2 is 0.01, whatever floats say


def found_within(rate: float, num_honest_auditors: int, versions: int) -> float:
    """Share of such liars that are found within so many versions: the geometric law itself."""
    return 1.0 - (1.0 - detection(rate, num_honest_auditors)) ** versions


def _rate(audits: float, num_replicas: int) -> float:
    """Each of the target's other replicas takes an equal share of the audits."""
    return min(1.0, audits / (num_replicas - 1)) if num_replicas > 1 else 0.0
