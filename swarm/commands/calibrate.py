"""`swarm calibrate`: how far this machine's honest results lie from one another."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from swarm.cli import ExitCode
from swarm.core.errors import SettingsError

if TYPE_CHECKING:
    from verification.replay.spread import Row


@click.command()
@click.option(
    "--audits",
    type=click.IntRange(min=1, max=10_000_000),
    default=2000,
    show_default=True,
    help="Comparisons for each compute dtype, codec and kind, at least.",
)
@click.option(
    "--subspace",
    type=click.IntRange(min=1, max=32),
    default=1,
    show_default=True,
    help="So many times fewer values between stages, as model.subspace.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for scripts.")
def command(audits: int, subspace: int, as_json: bool) -> ExitCode:
    """Measure this machine's honest spread against the thresholds of audits.

    The same work is computed with each thread count, batch split and instruction set, and compared as audits compare.
    Exit code 1 if an honest result lies past a fraud bound.
    """
    from verification.replay.calibration import Plan, available_instruction_sets, measure
    from verification.replay.spread import HIDDEN_SIZE

    if HIDDEN_SIZE % subspace:
        raise SettingsError(
            f"--subspace {subspace} does not divide the {HIDDEN_SIZE} values of the model that is computed"
        )
    plan = Plan(audits=audits, instruction_sets=available_instruction_sets(), subspace=subspace)
    what = f"{', '.join(plan.instruction_sets)} instructions, {len(plan.settings)} settings"
    shown = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=plan.num_microbatches)
        rows = measure(plan, lambda done: progress.update(task, completed=done))
    if as_json:
        click.echo(
            json.dumps({"instruction_sets": plan.instruction_sets, "rows": [row.to_json() for row in rows]}, indent=2)
        )
    else:
        Console(width=150).print(table_of(rows))
    wrong = [row for row in rows if row.exceeded and not row.report_only]
    for row in wrong:
        click.echo(
            f"swarm: {row.exceeded} of {row.comparisons} honest {row.kind}s in {row.dtype} over {row.codec} are past "
            f"the fraud bound of {row.fraud:g}: this machine would be banned, or ban others; look for a fault in it",
            err=True,
        )
    return ExitCode.FAILED if wrong else ExitCode.OK


def table_of(rows: "Sequence[Row]") -> Table:
    """The rows as people read them."""
    table = Table(title="honest relative L2 errors")
    for heading in ("compute", "wire", "of", "compared", "not equal", "largest", "99.9 %", "fraud past", "share"):
        table.add_column(heading, justify="left" if heading in ("compute", "wire", "of") else "right")
    table.add_column("false alarms")
    for row in rows:
        table.add_row(
            row.dtype,
            row.codec,
            row.kind,
            str(row.comparisons),
            str(row.differing),
            f"{row.largest:.1e}",
            f"{row.high:.1e}",
            f"{row.fraud:g}",
            f"{row.share:.3f}",
            f"{row.exceeded} raised" if row.false_alarm is None else f"under {row.false_alarm:.1e}",
            style="dim" if row.report_only else None,
        )
    table.caption = "Dim rows are report-only. False alarms: 95 % bounds, as if comparisons were independent."
    return table
