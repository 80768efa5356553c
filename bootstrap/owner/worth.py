"""A host is told before its run begins whether the swarm can be worth having, and asked where it cannot."""

from collections.abc import Callable, Sequence
from typing import Any

from swarm.core.plan import SUPPOSED, plan_run
from swarm.core.planning.verdict import Verdict, verdict_on
from swarm.core.settings import RunSettings
from swarm.manifest.model import hidden_size, stage_num_parameters
from swarm.question import ask

UNASKED = "give --yes to start such a run"


def ask_whether_to_start(settings: RunSettings, show: Callable[[dict[str, Any]], None], *, anyway: bool) -> None:
    """Says what `swarm plan` says of a fleet as it supposes it; asks unless that is good, or it starts `anyway`.

    Raises click's Exit when the answer is no, UsageError when there is nobody to ask.
    """
    verdict, refusals = _judged(settings)
    show({"event": "verdict", "verdict": verdict.told(), "times_alone": verdict.times_alone})
    for refusal in refusals:
        show({"event": "verdict", "verdict": refusal})
    if anyway or (verdict.is_good and not refusals):
        return
    ask("`swarm plan` reckons with other machines and lines. Start the run like this?", unasked=UNASKED)


def worth_of(settings: RunSettings) -> list[str]:
    """What `swarm plan` says of such a run with a fleet as it supposes it, a line each."""
    verdict, refusals = _judged(settings)
    return [verdict.told(), *refusals]


def _judged(settings: RunSettings) -> tuple[Verdict, Sequence[str]]:
    sizes, width = stage_num_parameters(settings.model), hidden_size(settings.model)
    plan = plan_run(settings, sizes, width, SUPPOSED)
    return verdict_on(settings, sizes, width, SUPPOSED, plan), plan.refusals
