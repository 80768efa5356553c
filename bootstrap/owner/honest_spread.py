"""How far honest work lies apart, by pair of numeric classes: what auditors say of it, each with one voice.

Nobody can check what an auditor says of audits that found nothing. So a figure stands beside the number of those who
bear it out: one that lies makes a row of its own, or is one voice in a median, and the farthest of others stays where
it is.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any, get_args

from swarm.core.audit.honest_audits import Agreed, AuditsMade
from swarm.core.settings import TensorKind

MAX_PAIRS = 64
"""Of numeric classes, shown."""


@dataclass(frozen=True)
class Spread:
    """Of one kind of tensor."""

    reporters: int
    """Auditors with audits of it."""
    audits: int
    """Of each of them, in the lower median."""
    median_share: float
    """Of the fraud bound: of each one's farthest, the lower median."""
    share_of_two: float
    """What the farthest of two of them at least has come to; 0 where there is but one."""
    largest_share: float
    """By anyone's word."""


@dataclass(frozen=True)
class PairSpread:
    """Of auditors of one class and work of another."""

    auditor: str
    audited: str
    reporters: int
    by_kind: dict[TensorKind, Spread]

    def to_json(self) -> dict[str, Any]:
        told = {str(kind): asdict(spread) for kind, spread in self.by_kind.items()}
        return {"auditor": self.auditor, "audited": self.audited, "reporters": self.reporters, **told}


def spread_by_pair(words: Iterable[AuditsMade]) -> list[PairSpread]:
    """Of the newest word of each member: pairs that most bear out come first, `MAX_PAIRS` at most."""
    told: dict[tuple[str, str], dict[TensorKind, list[Agreed]]] = defaultdict(lambda: defaultdict(list))
    reporters: dict[tuple[str, str], int] = defaultdict(int)
    for word in words:
        for audits in word.honest:
            pair = word.numeric_class, audits.numeric_class
            reporters[pair] += 1
            for kind in get_args(TensorKind):
                if audits.of(kind).num_audits:
                    told[pair][kind].append(audits.of(kind))
    found = [
        PairSpread(*pair, num, {kind: _spread(told[pair][kind]) for kind in get_args(TensorKind)})
        for pair, num in reporters.items()
    ]
    return sorted(found, key=_most_borne_out)[:MAX_PAIRS]


def _most_borne_out(pair: PairSpread) -> tuple[int, int, str, str]:
    audits = sum(spread.audits for spread in pair.by_kind.values())
    return -pair.reporters, -audits, pair.auditor, pair.audited


def _spread(told: list[Agreed]) -> Spread:
    if not told:
        return Spread(0, 0, 0.0, 0.0, 0.0)
    shares = sorted(one.largest_share for one in told)
    return Spread(
        reporters=len(told),
        audits=median_low([one.num_audits for one in told]),
        median_share=median_low(shares),
        share_of_two=shares[-2] if len(shares) > 1 else 0.0,
        largest_share=shares[-1],
    )
