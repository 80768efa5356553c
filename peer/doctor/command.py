"""`swarm doctor`: an owner learns what keeps a machine from taking part, and what to do."""

import json
from pathlib import Path

import click

from peer.doctor.diagnosis import Finding, Level
from peer.program.command import folder_option, host_of, read_address
from peer.program.state_folder import StateFolder
from swarm.log_format import harmless

MARKS = {Level.OK: ("ok", "green"), Level.WARNING: ("note", "yellow"), Level.PROBLEM: ("FAIL", "red")}


@click.command()
@click.argument("address", nargs=-1)
@click.option("--listen", default=":0", show_default=True, metavar="[HOST]:PORT", help="As `swarm join` has it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
@folder_option
def command(address: tuple[str, ...], listen: str, as_json: bool, folder: Path) -> int:
    """Look for what keeps this machine from training with the run at ADDRESS, or with any; takes 15 s where it is idle.

    Exit code 0 if nothing does, 1 if something does.
    """
    from peer.doctor.looks import Examination
    from swarm.network.loop import run

    addresses = read_address(address)[1]
    if addresses:
        host_of(addresses)
    examination = Examination(StateFolder(folder.absolute()), addresses, listen)
    found: list[Finding] = []

    async def examine(stop: object) -> None:
        async for finding in examination.findings():
            found.append(finding)
            if not as_json:
                _show(finding)

    run(examine)
    problems = sum(finding.level is Level.PROBLEM for finding in found)
    if as_json:
        values = [{**vars(finding), "level": finding.level.value} for finding in found]
        click.echo(json.dumps({"problems": problems, "findings": values}, indent=1))
    else:
        well = "nothing was found that keeps this machine from taking part"
        click.echo(f"{problems} {'problem' if problems == 1 else 'problems'} found" if problems else well)
    return 1 if problems else 0


def _show(finding: Finding) -> None:
    mark, colour = MARKS[finding.level]
    click.echo(
        f"{click.style(f'{mark:>4}', fg=colour)}  {click.style(finding.name, bold=True)}: {harmless(finding.says)}"
    )
    if finding.remedy:
        click.echo(f"      -> {harmless(finding.remedy)}")
