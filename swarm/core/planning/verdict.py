"""Whether a swarm is worth having: its speed beside that of one of its machines alone, said before anybody joins.

One machine alone is supposed to hold the whole model and to do nothing but compute: no links, no rounds, no waiting. In
windows of local steps tokens count by what they are worth (`swarm.core.planning.token_worth`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from swarm.core.plan import Assumptions, Plan, plan_run, tokens_per_s_alone
from swarm.core.planning.token_worth import worth_of_token
from swarm.core.settings import RunSettings

LARGEST_BATCH = 64
"""More than this many times the manifest's batch is no advice: it is another training."""
FASTEST_LINKS = 1024
"""Nor are links faster than this many times those supposed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    times_alone: float
    """The swarm's tokens/s over those of one machine alone, each for what it is worth."""
    worth: float
    """Of a token, beside one that a machine alone trains on."""
    bound_by: str
    """What most of a step's time goes to."""
    advice: str
    """What would make it faster than one machine; empty where it is."""

    @property
    def is_good(self) -> bool:
        return self.times_alone > 1.0

    def told(self) -> str:
        """In a sentence."""
        counted = "" if self.worth == 1.0 else f", a token of a window counted as {self.worth:.2g}"
        if self.is_good:
            return f"faster than one such machine alone by {self.times_alone:.2g}x, bound by {self.bound_by}{counted}"
        return (
            f"SLOWER than one such machine alone, at {self.times_alone:.2g} of its speed, bound by {self.bound_by}"
            f"{counted}; {self.advice}"
        )


def verdict_on(
    settings: RunSettings, num_parameters: Sequence[int], hidden_size: int, assumptions: Assumptions, plan: Plan
) -> Verdict:
    """`plan`: `plan_run` of the same."""
    alone = tokens_per_s_alone(settings, num_parameters, hidden_size, assumptions)

    def worth_in(of: Plan) -> float:
        return worth_of_token(assumptions.peers_per_stage, settings.averaging.local_steps, beside=of.beside_rounds)

    def times(changed: RunSettings, links: Assumptions) -> float:
        made = plan_run(changed, num_parameters, hidden_size, links)
        return worth_in(made) * made.tokens_per_s / alone

    worth = worth_in(plan)
    times_alone, advice = worth * plan.tokens_per_s / alone, ""
    if times_alone <= 1.0:
        reckoned: list[tuple[float, str, RunSettings]] = []
        for said, changed in _changes(settings):
            reckoned.append((times(changed, assumptions), said, changed))
            if reckoned[-1][0] > 1.0:
                break
        most, said, best = max(reckoned, key=lambda one: one[0])
        if most > 1.0:
            advice = f"try {said}: {most:.2g}x"
        else:
            advice = f"the most that settings give is {most:.2g} of it, with {said}"
            factors = range(2, FASTEST_LINKS + 1)
            # Faster links never make a swarm slower.
            at = bisect_left(factors, True, key=lambda by: times(best, _faster(assumptions, by)) > 1.0)
            if at < len(factors):
                enough = _faster(assumptions, factors[at])
                advice += f"; it takes links of {enough.uplink_mbit:g} Mbit/s up and {enough.downlink_mbit:g} down"
            else:
                advice += "; no links make it faster: take more peers a stage, fewer stages or slower machines"
            if not settings.has_windows:
                advice += "; `swarm plan --fleet` sets windows of local steps beside it"
    return Verdict(times_alone=times_alone, worth=worth, bound_by=_bound(settings, plan), advice=advice)


def _bound(settings: RunSettings, plan: Plan) -> str:
    """The largest part of a step."""
    slowest = max(plan.stages, key=lambda part: part.work_s)
    work = "computing" if slowest.compute_s >= slowest.work_s else "activations on the lines"
    exact_s = max(part.exact_s for part in plan.stages)
    seconds = {
        work: slowest.work_s,
        "averaging on the lines": max(part.round_s - part.exact_s for part in plan.stages),
        "encoding and the optimizer": exact_s,
    }
    if settings.averaging.delay == 0:
        seconds["filling the pipeline in each step"] = sum(part.fill_s for part in plan.stages) - slowest.fill_s
    return max(seconds, key=lambda name: seconds[name])


def _changes(settings: RunSettings) -> Iterator[tuple[str, RunSettings]]:
    """Settings to try, those that change the least of a training first."""
    averaging, codecs, batch = settings.averaging, settings.codecs, settings.batch
    is_audited_window = settings.has_windows and settings.trust == "public"
    delays = dict.fromkeys((averaging.delay,) if is_audited_window else (averaging.delay, 1))
    contributions = dict.fromkeys((codecs.averaging, "int2" if settings.has_windows else "int4"))
    hops = dict.fromkeys(((codecs.activations, codecs.activation_gradients), ("int4", "int4")))
    sizes = [batch.target_tokens << doublings for doublings in range(LARGEST_BATCH.bit_length())]
    for size, hop, contribution, delay in product(sizes, hops, contributions, delays):
        there, back = hop
        named = {
            f"averaging.delay = {delay}": delay != averaging.delay,
            f'codecs.averaging = "{contribution}"': contribution != codecs.averaging,
            f'codecs.activations = "{there}"': there != codecs.activations,
            f'codecs.activation_gradients = "{back}"': back != codecs.activation_gradients,
            f"batch.target_tokens = {size}": size != batch.target_tokens,
        }
        said = ", ".join(text for text, differs in named.items() if differs)
        if said:
            yield (
                said,
                replace(
                    settings,
                    averaging=replace(averaging, delay=delay),
                    codecs=replace(codecs, averaging=contribution, activations=there, activation_gradients=back),
                    batch=replace(batch, target_tokens=size),
                ),
            )


def _faster(assumptions: Assumptions, by: int) -> Assumptions:
    return replace(assumptions, uplink_mbit=by * assumptions.uplink_mbit, downlink_mbit=by * assumptions.downlink_mbit)
