"""A host is told before its run begins whether the swarm can be worth having, and asked where it cannot."""

from collections.abc import Callable
from typing import Any

from swarm.core.plan import SUPPOSED, plan_run
from swarm.core.settings import RunSettings
from swarm.core.verdict import verdict_on
from swarm.manifest.model import hidden_size, stage_num_parameters
from swarm.question import ask

UNASKED = "give --yes to start such a run"


def ask_whether_to_start(settings: RunSettings, show: Callable[[dict[str, Any]], None], *, anyway: bool) -> None:
    """Says what `swarm plan` says of a fleet as it supposes it; asks unless that is good, or it starts `anyway`.

    Raises click's Exit when the answer is no, UsageError when there is nobody to ask.
    """
    sizes, width = stage_num_parameters(settings.model), hidden_size(settings.model)
    plan = plan_run(settings, sizes, width, SUPPOSED)
    verdict = verdict_on(settings, sizes, width, SUPPOSED, plan)
    show({"event": "verdict", "verdict": verdict.told(), "times_alone": verdict.times_alone})
    for refusal in plan.refusals:
        show({"event": "verdict", "verdict": refusal})
    if anyway or (verdict.is_good and not plan.refusals):
        return
    ask("`swarm plan` reckons with other machines and lines. Start the run like this?", unasked=UNASKED)
