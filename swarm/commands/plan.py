"""`swarm plan`: shows what a run needs before anybody starts it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm.core.errors import SettingsError
from swarm.core.plan import SUPPOSED, Assumptions, Memory, Plan, StagePlan, plan_run, total_bytes
from swarm.core.planning.modes import Mode, best_of, best_of_each, modes_of
from swarm.core.planning.verdict import Verdict, verdict_on
from swarm.core.settings import RunSettings
from swarm.readable import count_text, duration_text, size_text

GIB = 1 << 30
Cell = Callable[[StagePlan], str]
WORTH = (
    "worth: of a token, beside one that a machine alone trains on; of windows as measured on a model of 0.13 M "
    "parameters with 4 and 8 members (docs/outer_steps.md); of one: tokens/s times that, over one machine's"
)
NO_CUT = "ask for more memory (--memory-gib), faster links or longer sessions, or take a smaller model"


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--uplink-mbit", type=click.FloatRange(min=0, min_open=True), default=SUPPOSED.uplink_mbit, show_default=True
)
@click.option(
    "--downlink-mbit", type=click.FloatRange(min=0, min_open=True), default=SUPPOSED.downlink_mbit, show_default=True
)
@click.option(
    "--round-trip-ms",
    type=click.FloatRange(min=0),
    default=SUPPOSED.round_trip_ms,
    show_default=True,
    help="Between peers.",
)
@click.option(
    "--peers",
    type=click.IntRange(min=1),
    default=SUPPOSED.peers_per_stage,
    show_default=True,
    help="Peers of each stage.",
)
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=SUPPOSED.tflops,
    show_default=True,
    help="10^12 operations a second a peer reaches (a desktop CPU 0.1, a gaming GPU 5 to 30).",
)
@click.option(
    "--exact-ns",
    type=click.FloatRange(min=0),
    help="For each parameter in a step's averaging and optimizer; by default as measured of the codec.",
)
@click.option(
    "--session-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=SUPPOSED.session_hours,
    show_default=True,
    help="How long a peer stays, on average.",
)
@click.option(
    "--fleet",
    type=click.IntRange(min=2),
    metavar="PEERS",
    help="Show which mode suits so many peers: whole models in windows of local steps, or a pipeline.",
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Memory of a peer of the fleet.",
)
@click.option(
    "--gpu-memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Of its GPU; by default it computes without one.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for scripts.")
def command(
    manifest: Path,
    uplink_mbit: float,
    downlink_mbit: float,
    round_trip_ms: float,
    peers: int,
    tflops: float,
    exact_ns: float | None,
    session_hours: float,
    fleet: int | None,
    memory_gib: float,
    gpu_memory_gib: float | None,
    as_json: bool,
) -> None:
    """Reckon what the run in MANIFEST needs of a peer of each stage.

    Exit code 2 if joining would take more than a tenth of a session.
    """
    from swarm.manifest.file import assumed_data, check_text_is_there, freeze, read_manifest
    from swarm.manifest.model import cuts, hidden_size, stage_num_parameters

    read = read_manifest(manifest)
    check_text_is_there(read)
    settings = freeze(read, assumed_data(read), ())
    assumptions = Assumptions(
        uplink_mbit=uplink_mbit,
        downlink_mbit=downlink_mbit,
        peers_per_stage=peers,
        tflops=tflops,
        session_hours=session_hours,
        round_trip_ms=round_trip_ms,
        exact_ns=exact_ns,
    )
    if fleet is not None:
        found = modes_of(
            settings,
            cuts(settings.model),
            lambda model: (stage_num_parameters(model), hidden_size(model)),
            assumptions,
            num_peers=fleet,
            memory=Memory(round(memory_gib * GIB), round((gpu_memory_gib or 0) * GIB)),
            can_run=_can_run,
        )
        best = best_of(found)
        if as_json:
            told = [_told(mode) for mode in found]
            click.echo(json.dumps({"modes": told, "best": best and _told(best)}, indent=2))
        else:
            _show_modes(found, best, fleet)
        if best is None:
            raise SettingsError(f"no mode suits {fleet} peers; {NO_CUT}")
        return
    sizes, width = stage_num_parameters(settings.model), hidden_size(settings.model)
    plan = plan_run(settings, sizes, width, assumptions)
    verdict = verdict_on(settings, sizes, width, assumptions, plan)
    if as_json:
        found_json = {"verdict": verdict.told(), "times_alone": verdict.times_alone}
        click.echo(json.dumps({**found_json, "assumptions": asdict(assumptions), **asdict(plan)}, indent=2))
    else:
        _show(plan, assumptions, verdict)
    if plan.refusals:
        raise SettingsError("\n".join(plan.refusals))


def _show(plan: Plan, assumptions: Assumptions, verdict: Verdict) -> None:
    console = Console(width=None, highlight=False)
    console.print(verdict.told(), style="bold green" if verdict.is_good else "bold red")
    console.print(
        f"{assumptions.peers_per_stage} peers a stage, {assumptions.uplink_mbit:g} Mbit/s up, "
        f"{assumptions.downlink_mbit:g} down, {assumptions.round_trip_ms:g} ms between them, "
        f"{assumptions.tflops:g} TFLOP/s each"
    )
    seconds = f"{plan.step_s:.2f} s" if plan.step_s >= 0.01 else f"{plan.step_s * 1000:.2g} ms"
    console.print(f"a step takes {seconds}: {plan.tokens_per_s:,.0f} tokens/s for the whole swarm")
    most = size_text(max(plan.run_bytes))
    console.print(f"the run takes {duration_text(plan.run_s)}; who stays for all of it moves up to {most}")
    alike = [list(parts) for _, parts in groupby(plan.stages, key=lambda part: replace(part, stage=0))]
    traffic = {**TRAFFIC, "a month": lambda part: size_text(plan.month_bytes[part.stage])}
    for title, columns in (("Each peer needs", MEMORY), ("In each step", TIMES), ("Traffic of each step", traffic)):
        console.print(_of_each(alike, title, columns))
    neediest = max(plan.stages, key=lambda part: total_bytes(part.memory_bytes, "host"))
    console.print(_memory(neediest))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _can_run(settings: RunSettings) -> bool:
    """Whether a host would take such a run."""
    from swarm.manifest.value import checked_settings, settings_to_value

    try:
        checked_settings(settings_to_value(settings))
    except SettingsError:
        return False
    return True


def _told(mode: Mode) -> dict[str, object]:
    return {
        "mode": mode.name,
        "local_steps": mode.settings.averaging.local_steps,
        **asdict(mode.cut),
        "worth_of_token": mode.worth,
        "worth_is_measured": mode.is_measured,
        "times_alone": mode.times_alone,
        "manifest": mode.lines,
    }


def _show_modes(found: Sequence[Mode], best: Mode | None, num_peers: int) -> None:
    console = Console(width=None, highlight=False)
    each = best_of_each(found)
    for title, shown in ((f"{num_peers} peers, the best of each mode", each), ("All of them", found)):
        console.print(_modes(shown, best, title))
    for mode in each:
        if mode.cut.problem:
            console.print(f"{_called(mode)}: {mode.cut.problem}")
    if any(mode.worth < 1 for mode in found):
        console.print(WORTH)
    if any(mode.settings.has_windows and mode.settings.averaging.delay for mode in found):
        console.print("ahead: the next window is computed while the round of the one before goes on")
    if any(not mode.is_measured for mode in each):
        console.print("~: so many members, or such windows, were not measured: taken on from those that were")
    if best is not None:
        slower = "" if best.times_alone > 1 else f"; it is SLOWER than one such machine alone ({best.times_alone:.2g}x)"
        console.print(f"recommended: {_called(best)}{slower}", style="bold green" if not slower else "bold red")
        for line in best.lines:
            console.print(f"set {line}", markup=False)


def _called(mode: Mode) -> str:
    num_stages, averaging = mode.cut.num_stages, mode.settings.averaging
    if averaging.local_steps > 1:  # of whole models
        return f"windows of {averaging.local_steps}" + (", ahead" if averaging.delay else "")
    return f"{'whole' if num_stages == 1 else f'{num_stages} stages'}, each step"


def _modes(shown: Sequence[Mode], best: Mode | None, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("mode", "peers", "tokens/s", "worth", "of one", "memory", "join", "lack"):
        table.add_column(column, justify="left" if column in ("mode", "lack") else "right", no_wrap=True)
    for mode in shown:
        cut = mode.cut
        table.add_row(
            _called(mode),
            str(cut.peers_per_stage),
            f"{cut.tokens_per_s:,.0f}",
            f"{'' if mode.is_measured else '~'}{mode.worth:.2f}",
            f"{mode.times_alone:.2g}x",
            f"{cut.needs.host_bytes / 1e9:,.1f} GB",
            duration_text(cut.join_s),
            "best" if mode is best else cut.lacks,
        )
    return table


def _stages(alike: Sequence[StagePlan]) -> str:
    first, last = alike[0].stage, alike[-1].stage
    return str(first) if first == last else f"{first} to {last}"


def _of_each(stages: Sequence[Sequence[StagePlan]], title: str, columns: Mapping[str, Cell]) -> Table:
    """A row for each run of stages that are alike."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", *columns):
        table.add_column(column, justify="right")
    for alike in stages:
        table.add_row(_stages(alike), *(cell(alike[0]) for cell in columns.values()))
    return table


MEMORY: Mapping[str, Cell] = {
    "layers": lambda part: str(part.num_layers),
    "parameters": lambda part: count_text(part.num_parameters),
    "memory": lambda part: size_text(total_bytes(part.memory_bytes, "host")),
    "or, slower": lambda part: size_text(total_bytes(part.least_memory_bytes, "host")),
    "beside a GPU": lambda part: size_text(total_bytes(part.gpu_memory_bytes, "host")),
    "of the GPU": lambda part: size_text(total_bytes(part.gpu_memory_bytes, "device")),
    "disk": lambda part: size_text(total_bytes(part.memory_bytes, "disk")),
}
TIMES: Mapping[str, Cell] = {
    "compute": lambda part: duration_text(part.compute_s),
    "encoding, optimizer": lambda part: duration_text(part.exact_s),
    "round": lambda part: duration_text(part.round_s),
    "uplink busy": lambda part: duration_text(part.uplink_s),
    "to join": lambda part: duration_text(part.join_s),
}
TRAFFIC: Mapping[str, Cell] = {
    "round, up": lambda part: size_text(part.round_up_bytes),
    "down": lambda part: size_text(part.round_down_bytes),
    "hops, up": lambda part: size_text(part.activation_up_bytes),
    "down ": lambda part: size_text(part.activation_down_bytes),
    "to join": lambda part: size_text(part.join_bytes),
}


def _memory(part: StagePlan) -> Table:
    table = Table(title=f"What a peer of stage {part.stage} holds", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("without a GPU", justify="right")
    table.add_column("with one", justify="right")
    for name in sorted({*part.memory_bytes, *part.gpu_memory_bytes}):
        sizes = [of.get(name) for of in (part.memory_bytes, part.gpu_memory_bytes)]
        table.add_row(name.replace(".", ": ", 1), *("" if size is None else size_text(size) for size in sizes))
    return table
