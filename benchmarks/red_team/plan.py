"""What a mutating liar will do in a run: a few rules, drawn from the seed, each with chance of its own.

A rule that is taken out leaves the others as they were, so a failing plan can be made smaller.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

from benchmarks.red_team.mutations import Way, ways_of
from benchmarks.red_team.records import declared, slots_of
from swarm.core.forms import Items
from swarm.core.record import Signed

Where: TypeAlias = Literal["made", "sent", "message", "life"]
"""`made`: a record as the liar's own program makes it, which then believes it. `sent`: in one message, signed again.
`message`: a whole message. `life`: the peer."""
Deed: TypeAlias = Literal["drop", "delay", "repeat", "misdirect", "old", "withhold", "rejoin", "charge"]
OF_MESSAGES: tuple[Deed, ...] = ("drop", "delay", "repeat", "misdirect", "old", "withhold")
OF_LIFE: tuple[Deed, ...] = ("rejoin", "charge")

MOST_RULES = 8
SHARES = (0.1, 0.5, 1.0)
LONGEST_WINDOW = 12
RARE = 0.05
"""Of a record that is not made in every run: weighed so much less."""


@dataclass(frozen=True)
class Rule:
    """One thing that is done."""

    number: int
    where: Where
    kind: str = ""
    """Of a record; for messages the method, or nothing for all."""
    field: str = ""
    way: Way = "extreme"
    deed: Deed = "drop"
    share: float = 1.0
    """How often, where it could be."""
    from_step: int = 0
    to_step: int = LONGEST_WINDOW

    def acts_at(self, step: int) -> bool:
        return self.from_step <= step < self.to_step

    def __str__(self) -> str:
        steps = f"steps {self.from_step} to {self.to_step - 1}, {self.share:.0%}"
        if self.where in ("made", "sent"):
            return f"{self.kind}.{self.field} {self.way} as {self.where} ({steps})"
        return f"{self.deed} {self.kind or 'anything'} ({steps})"

    def to_value(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Plan:
    """What all liars of a run do, together."""

    seed: int
    rules: tuple[Rule, ...]

    @classmethod
    def of_seed(cls, seed: int, *, made: Sequence[str], methods: Sequence[str]) -> "Plan":
        """`made`: the kinds of records that peers make in any run; `methods`: what they call."""
        rng = random.Random(f"plan {seed}")
        count = rng.randrange(1, MOST_RULES + 1)
        return cls(seed, tuple(_rule(number, rng, made, methods) for number in range(count)))

    def without(self, number: int) -> "Plan":
        return replace(self, rules=tuple(rule for rule in self.rules if rule.number != number))

    def before(self, step: int) -> "Plan":
        """The same, where nothing is done from that step on."""
        cut = tuple(replace(rule, to_step=min(rule.to_step, step)) for rule in self.rules)
        return replace(self, rules=tuple(rule for rule in cut if rule.from_step < rule.to_step))

    def chance(self, rule: Rule) -> random.Random:
        """Of one rule alone."""
        return random.Random(f"{self.seed}/{rule.number}")


def _rule(number: int, rng: random.Random, made: Sequence[str], methods: Sequence[str]) -> Rule:
    where: Where = rng.choice(("made", "made", "made", "made", "sent", "sent", "message", "life"))
    start = rng.choice((0, 0, rng.randrange(8)))
    rule = Rule(number, where, from_step=start, to_step=start + rng.randrange(2, LONGEST_WINDOW + 1))
    rule = replace(rule, share=rng.choice(SHARES))
    if where == "message":
        deed = rng.choice(OF_MESSAGES)
        return replace(rule, kind=rng.choice(("", *methods)), deed=deed)
    if where == "life":
        return replace(rule, deed=rng.choice(OF_LIFE))
    kind, wire_name, way = rng.choices(*_choices(tuple(made)))[0]
    return replace(rule, kind=kind, field=wire_name, way=way)


@cache
def _choices(made: tuple[str, ...]) -> tuple[list[tuple[str, str, Way]], list[float]]:
    """Everything that may be done to a field of a record, and how often: what every run has oftener than what few have,
    what is signed oftener than what is in it, lists, which have no end, oftener than single values."""
    found: list[tuple[str, str, Way]] = []
    weights: list[float] = []
    for kind in declared():
        slots = slots_of(kind)
        of_kind = (1.0 if kind.__name__ in made else RARE) * (3.0 if issubclass(kind, Signed) else 1.0)
        of_fields = [3.0 if isinstance(form, Items) else 1.0 for _, _, form in slots]
        for (wire_name, _, form), of_field in zip(slots, of_fields, strict=True):
            ways = ways_of(form)
            of_ways = [4.0 if way in ("longest", "sibling") else 1.0 for way in ways]
            for way, of_way in zip(ways, of_ways, strict=True):
                found.append((kind.__name__, wire_name, way))
                weights.append(of_kind * of_field / sum(of_fields) * of_way / sum(of_ways))
    return found, weights


assert set(OF_MESSAGES) | set(OF_LIFE) == set(get_args(Deed))
