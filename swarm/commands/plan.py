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
from swarm.core.plan import SUPPOSED, Assumptions, Cut, Plan, StagePlan, best_cut, plan_cut, plan_run, total_bytes
from swarm.core.verdict import Verdict, verdict_on

Cell = Callable[[StagePlan], str]
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
    "--fleet", type=click.IntRange(min=2), metavar="PEERS", help="Show how to cut the model for so many peers."
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Memory of a peer of the fleet.",
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
    as_json: bool,
) -> None:
    """Reckon what the run in MANIFEST needs of a peer of each stage.

    Exit code 2 if joining would take more than a tenth of a session.
    """
    from swarm.manifest.file import assumed_data, freeze, read_manifest
    from swarm.manifest.model import cuts, hidden_size, stage_num_parameters

    read = read_manifest(manifest)
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
        found = [
            plan_cut(
                replace(settings, model=model),
                stage_num_parameters(model),
                hidden_size(model),
                assumptions,
                num_peers=fleet,
                memory_bytes=round(memory_gib * (1 << 30)),
            )
            for model in cuts(settings.model)
            if model.num_stages == 1 or not settings.has_windows
        ]
        best = best_cut(found)
        if as_json:
            cuts_json = [asdict(cut) for cut in found]
            click.echo(json.dumps({"cuts": cuts_json, "best_stages": best.num_stages if best else None}, indent=2))
        else:
            _show_cuts(found, best, fleet)
        if best is None:
            raise SettingsError(f"no cut suits {fleet} peers: {found[-1].problem}; {NO_CUT}")
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
    most = _size(max(plan.run_bytes))
    console.print(f"the run takes {plan.run_s / 3600:,.1f} hours; who stays for all of it moves up to {most}")
    alike = [list(parts) for _, parts in groupby(plan.stages, key=lambda part: replace(part, stage=0))]
    traffic = {**TRAFFIC, "a month": lambda part: _size(plan.month_bytes[part.stage])}
    for title, columns in (("Each peer needs", MEMORY), ("In each step", TIMES), ("Traffic of each step", traffic)):
        console.print(_of_each(alike, title, columns))
    neediest = max(plan.stages, key=lambda part: total_bytes(part.memory_bytes, "host"))
    console.print(_memory(neediest))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _show_cuts(found: list[Cut], best: Cut | None, num_peers: int) -> None:
    table = Table(
        title=f"The model cut for {num_peers} peers", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for title in ("stages", "peers each", "tokens/s", "of one alone", "memory", "join", "traffic a month", ""):
        table.add_column(title, justify="right" if title else "left")
    for cut in found:
        table.add_row(
            str(cut.num_stages),
            str(cut.peers_per_stage),
            f"{cut.tokens_per_s:,.0f}",
            f"{cut.times_alone:.2g}x",
            _size(cut.host_bytes),
            f"{cut.join_s / 60:.1f} min",
            _size(cut.month_bytes),
            "best" if cut is best else cut.problem,
        )
    console = Console(width=None)
    console.print(table)
    if best is not None:
        console.print(f"set model.stages = {best.num_stages}")


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
    "parameters": lambda part: _count(part.num_parameters),
    "memory": lambda part: _size(total_bytes(part.memory_bytes, "host")),
    "or, slower": lambda part: _size(total_bytes(part.least_memory_bytes, "host")),
    "beside a GPU": lambda part: _size(total_bytes(part.gpu_memory_bytes, "host")),
    "of the GPU": lambda part: _size(total_bytes(part.gpu_memory_bytes, "device")),
    "disk": lambda part: _size(total_bytes(part.memory_bytes, "disk")),
}
TIMES: Mapping[str, Cell] = {
    "compute": lambda part: _seconds(part.compute_s),
    "encoding, optimizer": lambda part: _seconds(part.exact_s),
    "round": lambda part: _seconds(part.round_s),
    "uplink busy": lambda part: _seconds(part.uplink_s),
    "to join": lambda part: _seconds(part.join_s),
}
TRAFFIC: Mapping[str, Cell] = {
    "round, up": lambda part: _size(part.round_up_bytes),
    "down": lambda part: _size(part.round_down_bytes),
    "hops, up": lambda part: _size(part.activation_up_bytes),
    "down ": lambda part: _size(part.activation_down_bytes),
    "to join": lambda part: _size(part.join_bytes),
}


def _memory(part: StagePlan) -> Table:
    table = Table(title=f"What a peer of stage {part.stage} holds", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("without a GPU", justify="right")
    table.add_column("with one", justify="right")
    for name in sorted({*part.memory_bytes, *part.gpu_memory_bytes}):
        sizes = [of.get(name) for of in (part.memory_bytes, part.gpu_memory_bytes)]
        table.add_row(name.replace(".", ": ", 1), *("" if size is None else _size(size) for size in sizes))
    return table


def _count(number: int) -> str:
    for letter, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return str(number)


def _seconds(seconds: float) -> str:
    """Of three digits, in the unit that fits."""
    unit, scale = ("h", 3600.0) if seconds >= 7200 else ("min", 60.0) if seconds >= 120 else ("s", 1.0)
    return f"{seconds / scale:.3g} {unit}"


def _size(size_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.1f} {unit}"
    return f"{size_bytes:.0f} B"
