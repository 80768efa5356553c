"""`swarm plan`: shows what a run needs before anybody starts it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from swarm.core.errors import SettingsError
from swarm.core.plan import Assumptions, Cut, Plan, best_cut, plan_cut, plan_run, total_bytes

NO_CUT = "ask for more memory (--memory-gib), faster links or longer sessions, or take a smaller model"


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--uplink-mbit", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True)
@click.option("--downlink-mbit", type=click.FloatRange(min=0, min_open=True), default=100.0, show_default=True)
@click.option("--round-trip-ms", type=click.FloatRange(min=0), default=40.0, show_default=True, help="Between peers.")
@click.option("--peers", type=click.IntRange(min=1), default=4, show_default=True, help="Peers of each stage.")
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
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
    default=4.0,
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
    plan = plan_run(settings, stage_num_parameters(settings.model), hidden_size(settings.model), assumptions)
    if as_json:
        click.echo(json.dumps({"assumptions": asdict(assumptions), **asdict(plan)}, indent=2))
    else:
        _show(plan, assumptions)
    if plan.refusals:
        raise SettingsError("\n".join(plan.refusals))


def _show(plan: Plan, assumptions: Assumptions) -> None:
    console = Console(width=None)
    console.print(
        f"{assumptions.peers_per_stage} peers a stage, {assumptions.uplink_mbit:g} Mbit/s up, "
        f"{assumptions.downlink_mbit:g} down, {assumptions.round_trip_ms:g} ms between them, "
        f"{assumptions.tflops:g} TFLOP/s each"
    )
    console.print(_table(plan))
    seconds = f"{plan.step_s:.2f} s" if plan.step_s >= 0.01 else f"{plan.step_s * 1000:.2g} ms"
    console.print(f"a step takes {seconds}: {plan.tokens_per_s:,.0f} tokens/s for the whole swarm")
    most = _size(max(plan.run_bytes))
    console.print(f"the run takes {plan.run_s / 3600:,.1f} hours; who stays for all of it moves up to {most}")
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _show_cuts(found: list[Cut], best: Cut | None, num_peers: int) -> None:
    table = Table(title=f"The model cut for {num_peers} peers")
    for title in ("stages", "peers each", "tokens/s", "memory", "join", "traffic a month", ""):
        table.add_column(title, justify="right" if title else "left")
    for cut in found:
        table.add_row(
            str(cut.num_stages),
            str(cut.peers_per_stage),
            f"{cut.tokens_per_s:,.0f}",
            _size(cut.host_bytes),
            f"{cut.join_s / 60:.1f} min",
            _size(cut.month_bytes),
            "best" if cut is best else cut.problem,
        )
    console = Console(width=None)
    console.print(table)
    if best is not None:
        console.print(f"set model.stages = {best.num_stages}")


def _table(plan: Plan) -> Table:
    table = Table(title="Each peer needs")
    table.add_column("")
    for part in plan.stages:
        table.add_column(f"stage {part.stage}", justify="right")

    def row(title: str, cells: list[str]) -> None:
        table.add_row(title, *cells)

    def each(show: "dict[str, object]") -> None:
        for title, make in show.items():
            assert callable(make)
            row(title, [make(part) for part in plan.stages])

    each({"layers": lambda part: str(part.num_layers), "parameters": lambda part: f"{part.num_parameters:,}"})
    for name in _memory_names(plan):
        row(name, [_size(part.memory_bytes[name]) if name in part.memory_bytes else "" for part in plan.stages])
    each(
        {
            "host memory in all": lambda part: _size(total_bytes(part.memory_bytes, "host")),
            "sample by sample": lambda part: _size(total_bytes(part.least_memory_bytes, "host")),
            "round, up a step": lambda part: _size(part.round_up_bytes),
            "round, down a step": lambda part: _size(part.round_down_bytes),
            "activations, up a step": lambda part: _size(part.activation_up_bytes),
            "activations, down a step": lambda part: _size(part.activation_down_bytes),
            "compute a step": lambda part: f"{part.compute_s:.3g} s",
            "averaging and optimizer a step": lambda part: f"{part.exact_s:.3g} s",
            "uplink busy a step": lambda part: f"{part.uplink_s:.3g} s",
            "join": lambda part: f"{_size(part.join_bytes)}, {part.join_s / 60:.1f} min",
        }
    )
    row("traffic a month, all day", [_size(size) for size in plan.month_bytes])
    return table


def _memory_names(plan: Plan) -> list[str]:
    names: dict[str, None] = {}
    for part in plan.stages:
        names |= dict.fromkeys(part.memory_bytes)
    return list(names)


def _size(size_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.1f} {unit}"
    return f"{size_bytes:.0f} B"
