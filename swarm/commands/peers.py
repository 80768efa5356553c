"""`swarm peers`: how far a run is, who is there, and what each has done, as the run's host knows it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from swarm.proto import coordinator_pb2 as pb


@click.command()
@click.argument("invite")
@click.option("--stage", type=click.IntRange(min=0), help="Only this stage's peers.")
@click.option("--all", "also_gone", is_flag=True, help="Also those that have left.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(invite: str, stage: int | None, also_gone: bool, as_json: bool) -> None:
    """Show how far INVITE's run is, who is there, and what certified results say each has done.

    No daemon is needed, and none is told: only the host is asked.
    """
    from rich.console import Console

    from swarm.invite import parse_invite
    from swarm.network.services.coordinator_client import coordinator_client
    from swarm.readable import wrapped

    with coordinator_client(parse_invite(invite)) as client:
        status = client.status()
        stages = [told.stage for told in status.stages] if stage is None else [stage]
        peers = [peer for number in stages for peer in client.peers(number).peers if peer.present or also_gone]
    if as_json:
        click.echo(json.dumps(_value(status, peers), indent=2))
        return
    click.echo(wrapped(_told(status)))
    for held in status.stages:
        wanted = f", {held.num_missing} more wanted" if held.num_missing else ""
        click.echo(f"stage {held.stage}: version {held.version}, {held.num_present} present{wanted}")
    if peers:
        console = Console(width=None if sys.stdout.isatty() else WIDEST)
        console.print(fitting(peers, console))


WIDEST = 150
FIGURES: "Mapping[str, Callable[[pb.Peer], str]]" = {
    "version": lambda peer: str(peer.version),
    "tokens": lambda peer: f"{peer.num_tokens:,}",
    "microbatches": lambda peer: f"{peer.num_microbatches:,}",
    "steps": lambda peer: f"{peer.num_steps:,}",
    "rank": lambda peer: str(peer.rank or ""),
    "direct": lambda peer: str(peer.num_direct or ""),
    "punched": lambda peer: str(peer.num_punched or ""),
    "relayed": lambda peer: str(peer.num_relayed or ""),
}


def fitting(peers: "Sequence[pb.Peer]", console: "Console") -> "Table":
    """`table_of` with whole peer ids, or, where these make it too wide, with their last 8 characters, as the host's
    lines name peers."""
    whole = table_of(peers, lambda peer_id: peer_id)
    if console.measure(whole, options=console.options.update(max_width=WIDEST)).maximum <= console.width:
        return whole
    short = table_of(peers, lambda peer_id: f"..{peer_id[-8:]}")
    short.caption = "--json has peer ids whole"
    return short


def table_of(peers: "Sequence[pb.Peer]", name: "Callable[[str], str]") -> "Table":
    """The peers as people read them: those of a stage together, who has done most first; figures that any has."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("stage", "peer", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    shown = {heading: told for heading, told in FIGURES.items() if any(map(told, peers))}
    for heading in shown:
        table.add_column(heading, justify="right")
    for peer in sorted(peers, key=lambda peer: (peer.stage, -peer.num_tokens, peer.peer_id)):
        figures = [told(peer) for told in shown.values()]
        table.add_row(str(peer.stage), name(peer.peer_id), *figures, style=None if peer.present else "dim")
    return table


def _told(status: "pb.Status") -> str:
    """How far the run is, on one line."""
    parts = [f"{status.name}: version {status.version} of {status.total_steps}", f"{status.num_tokens:,} tokens"]
    if status.tokens_per_s:
        parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if status.HasField("loss"):
        parts.append(f"loss {status.loss:.4f}")
    if status.HasField("held_out_loss"):
        parts.append(f"held-out loss {status.held_out_loss:.4f}")
    return ", ".join(parts)


def _value(status: "pb.Status", peers: "Sequence[pb.Peer]") -> dict[str, Any]:
    return {
        "run_id": status.run_id,
        "name": status.name,
        "version": status.version,
        "total_steps": status.total_steps,
        "tokens": status.num_tokens,
        "tokens_per_s": status.tokens_per_s,
        "loss": status.loss if status.HasField("loss") else None,
        "held_out_loss": status.held_out_loss if status.HasField("held_out_loss") else None,
        "stages": [
            {"stage": held.stage, "version": held.version, "present": held.num_present, "missing": held.num_missing}
            for held in status.stages
        ],
        "peers": [
            {
                "peer_id": peer.peer_id,
                "stage": peer.stage,
                "version": peer.version,
                "present": peer.present,
                "tokens": peer.num_tokens,
                "microbatches": peer.num_microbatches,
                "steps": peer.num_steps,
                "rank": peer.rank or None,
                "links": {"direct": peer.num_direct, "punched": peer.num_punched, "relayed": peer.num_relayed},
            }
            for peer in peers
        ],
    }
