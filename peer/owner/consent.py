"""What a volunteer is told of joining, and asked, before anything is joined."""

import asyncio
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swarm.core.owner.limits import LIMITS, NONE, OwnerLimits
from swarm.core.plan import Assumptions, plan_run, total_bytes
from swarm.core.settings import RunSettings
from swarm.manifest.model import hidden_size, num_frozen, stage_num_parameters
from swarm.manifest.signed_run import SignedRun
from swarm.question import ask as ask_person
from swarm.readable import count_text
from verification.audit.coverage import checks_of

SUPPOSED_UP_MBIT, SUPPOSED_DOWN_MBIT = 20.0, 100.0
SUPPOSED_PEERS, SUPPOSED_TFLOPS, SUPPOSED_HOURS = 4, 0.1, 4.0


async def silent(signed_run: SignedRun, settings: RunSettings) -> None:
    """Nobody is asked."""


def ask(
    stage: int | None, limits: OwnerLimits, num_peers: int = 1
) -> Callable[[SignedRun, RunSettings], Awaitable[None]]:
    """Shows the offer of a run and asks once, whichever of the daemon's peers comes to it first; raises click's Exit
    when the answer is no."""
    agreed: set[str] = set()
    refused: list[Exception] = []
    asking = asyncio.Lock()

    async def consent(signed_run: SignedRun, settings: RunSettings) -> None:
        name = signed_run.run_id
        async with asking:
            if refused:
                raise refused[0]
            if name not in agreed:
                try:
                    await asyncio.to_thread(show_and_ask, signed_run, settings, stage, limits, num_peers)
                except Exception as error:
                    refused.append(error)
                    raise
                agreed.add(name)

    return consent


def show_and_ask(
    signed_run: SignedRun, settings: RunSettings, stage: int | None, limits: OwnerLimits, num_peers: int = 1
) -> None:
    """Raises click's Exit when the answer is no, UsageError when there is nobody to ask."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, text in offer(signed_run, settings, stage, limits, num_peers).items():
        table.add_row(title, Text(text))  # not markup, whatever a host calls its licences
    Console(highlight=False).print(Padding(table, (1, 2)))
    ask_person("Join?", unasked="give --yes to join")


def offer(
    signed_run: SignedRun, settings: RunSettings, stage: int | None, limits: OwnerLimits, num_peers: int = 1
) -> dict[str, str]:
    """What joining the run with so many peers means, for its reader to agree to, by title."""
    plan = plan_run(
        settings,
        stage_num_parameters(settings.model),
        hidden_size(settings.model),
        Assumptions(
            uplink_mbit=(limits.upload_mbit or SUPPOSED_UP_MBIT) / num_peers,
            downlink_mbit=(limits.download_mbit or SUPPOSED_DOWN_MBIT) / num_peers,
            peers_per_stage=SUPPOSED_PEERS,
            tflops=SUPPOSED_TFLOPS,
            session_hours=SUPPOSED_HOURS,
        ),
    )
    stages = plan.stages if stage is None or stage >= len(plan.stages) else plan.stages[stage : stage + 1]
    month = [num_peers * plan.month_bytes[part.stage] / 1e9 for part in stages]
    minutes = [part.join_s / 60 for part in stages]
    memory = [total_bytes(part.memory_bytes, "host", num_peers) / (1 << 30) for part in stages]
    most_month = "" if limits.month_gb is None else f", and never more than {limits.month_gb:g}"
    where = f"stage {stages[0].stage}" if len(stages) == 1 else f"one of {len(stages)} stages"
    holds = f"hold {where}" if num_peers == 1 else f"hold {where} on each of {num_peers} GPUs"
    total = sum(part.num_parameters for part in plan.stages)
    return {
        "run": f"{settings.name}, id {signed_run.run_id[:16]}",
        "host's key": signed_run.run_key,
        "model": f"{_model(settings, total)}; this machine would {holds}",
        "licences": f"model: {settings.model_licence}; data: {settings.data_licence}",
        "your address": "the host, other peers of the run and the host's mirrors see this machine's IP address",
        "traffic": f"up to {_span(month)} GB a month, if it works all day{most_month}",
        "time to join": f"{_span(minutes)} minutes of download",
        "memory": f"{_span(memory)} GiB, the program itself included",
        "checks": checks_of(settings),
        "limits": _in_force(limits),
    }


def _in_force(limits: OwnerLimits) -> str:
    held = [f"{limit.name} {limits.get(limit.name)}" for limit in LIMITS if limits.get(limit.name) != NONE]
    return ", ".join(held) + "; change them with `swarm config`"


def _model(settings: RunSettings, trained: int) -> str:
    adapters = settings.model.adapters
    if not adapters.rank:
        return f"{count_text(trained)} parameters"
    frozen = num_frozen(settings.model)
    kept = "in 4 bits" if adapters.base == "nf4" else "as it is"
    of_adapters = f"{count_text(trained)} parameters of adapters (LoRA, rank {adapters.rank})"
    return f"{of_adapters}, on {count_text(frozen)} frozen {kept}"


def _span(values: list[float]) -> str:
    low, high = _rounded(min(values)), _rounded(max(values))
    return low if low == high else f"{low} to {high}"


def _rounded(value: float) -> str:
    if value < 0.1:
        return "less than 0.1"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
