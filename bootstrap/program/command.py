"""`swarm host`: a run's manifest becomes a host that peers can join."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Literal

import click

from bootstrap.owner.trouble import line_of
from swarm.core.errors import SettingsError
from swarm.log_format import log_to_terminal
from swarm.network.addresses import beside, listen_multiaddresses
from swarm.readable import duration_text, wrapped
from swarm.release import checked_release

BULK_SHARE = 0.5
"""Of a relay's budget, where its owner says nothing of bulk."""


@click.command(name="host", short_help="Start a run and coordinate it.")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--dir", "--data", "folder", type=click.Path(path_type=Path), help="The run's folder. Default: beside the manifest."
)
@click.option(
    "--listen",
    default=":0",
    show_default=True,
    metavar="[HOST]:PORT",
    help="Without HOST: at all of this machine's addresses, of IPv6 too if it has one.",
)
@click.option("--service", metavar="[HOST]:PORT", help="gRPC service. Default: --listen, its port and one.")
@click.option("--web", metavar="[HOST]:PORT|none", help="Web page and metrics. Default: --listen, its port and two.")
@click.option(
    "--relay-gb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Carry peers that cannot be dialled, so much in all. Listens at --listen, its port and three.",
)
@click.option(
    "--relay-bulk-gb",
    type=click.FloatRange(min=0),
    metavar="GB",
    help="Of --relay-gb, for bulk; then control alone. Default: half. Peers whose routers can be punched need none.",
)
@click.option("--archive", metavar="URL", help="Keep the checkpoints there too: file:, s3:, what else fsspec opens.")
@click.option(
    "--mirror",
    multiple=True,
    metavar="URL",
    help="An https folder that holds a copy of the run's data/; peers take tokens from there too. Can be repeated.",
)
@click.option("--public", metavar="NAME", help="Name or number by which strangers reach this machine.")
@click.option(
    "--admission",
    type=click.Choice(["open", "ticket", "list"]),
    default="open",
    show_default=True,
    help="Whom to admit: everyone, whom `swarm ticket create` gave a voucher, or the peers in --allow.",
)
@click.option("--allow", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Peer ids, one a line.")
@click.option("--minimum-release", default="0", help="Oldest release of this program to take in.")
@click.option("--evaluate-tokens", type=click.IntRange(min=1), default=65536, show_default=True)
@click.option("--eval-tasks", metavar="TASK,...", help="Try checkpoints at these tasks of lm-eval; files of tasks too.")
@click.option(
    "--reference",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Another run's --report, or a CSV of tokens,loss: a notice when the held-out loss stays above it.",
)
@click.option(
    "--track",
    multiple=True,
    metavar="KIND:PLACE",
    help="Feed a tracker too: tensorboard:DIR, trackio:PROJECT or wandb:PROJECT. Can be repeated.",
)
@click.option("--yes", is_flag=True, help="Start a run that is slower than one machine without asking, as --json does.")
@click.option("--ends-with-run", is_flag=True, help="Go when the run is over, instead of serving its checkpoints.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the run's figures here as JSON at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines, for scripts.")
@click.option("--verbose", is_flag=True, help="Log what happens.")
def command(
    manifest: Path,
    folder: Path | None,
    listen: str,
    service: str | None,
    web: str | None,
    relay_gb: float | None,
    relay_bulk_gb: float | None,
    archive: str | None,
    mirror: tuple[str, ...],
    public: str | None,
    admission: Literal["open", "ticket", "list"],
    allow: Path | None,
    minimum_release: str,
    evaluate_tokens: int,
    eval_tasks: str | None,
    reference: Path | None,
    track: tuple[str, ...],
    yes: bool,
    ends_with_run: bool,
    report: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Start (or take up again) the run that MANIFEST describes, until Ctrl-C.

    When the run is over its peers go, and the host goes on serving what came of it.
    """
    log_to_terminal(verbose=verbose)
    from bootstrap.directory.admission import AdmissionPolicy, listed_peers
    from bootstrap.directory.doors import DoorSettings
    from bootstrap.directory.relaying import RelaySettings
    from bootstrap.owner.reference import read_reference
    from bootstrap.owner.worth import ask_whether_to_start
    from bootstrap.program.held_run import HeldRun
    from bootstrap.program.host import HostSettings
    from bootstrap.program.hosting import Hosting, HostingSettings
    from bootstrap.state.remote_archive import open_place
    from bootstrap.state.run_folder import RunFolder, prepare_run
    from bootstrap.state.task_scores import checked_tasks
    from bootstrap.tracking.places import TrackerPlace
    from swarm.manifest.file import assumed_data, freeze, read_manifest
    from swarm.memory.allocator import return_large_blocks
    from swarm.network.loop import run
    from swarm.network.services.mirror import checked_mirrors

    return_large_blocks()
    show = _Shown(as_json)
    if (admission == "list") != (allow is not None):
        raise SettingsError("--admission list and --allow FILE go together; give both or none")
    policy = AdmissionPolicy(admission, frozenset() if allow is None else listed_peers(allow))
    doors = DoorSettings(
        service=service or beside(listen, 1),
        web=None if web == "none" else web or beside(listen, 2),
        public=public,
    )
    relay = None
    if relay_gb is not None:
        relay = RelaySettings(
            listen=listen_multiaddresses(beside(listen, 3)),
            budget_bytes=int(relay_gb * 1e9),
            bulk_bytes=int((relay_gb * BULK_SHARE if relay_bulk_gb is None else relay_bulk_gb) * 1e9),
            public=public,
        )
    elif relay_bulk_gb is not None:
        raise SettingsError("--relay-bulk-gb: it is a part of --relay-gb; give that too")
    if report is not None and not report.absolute().parent.is_dir():
        raise SettingsError(f"--report {report}: its folder does not exist; create it or choose another path")
    read = read_manifest(manifest)
    settings = HostingSettings(
        listen=listen_multiaddresses(listen),
        host=HostSettings(
            evaluate_tokens=evaluate_tokens,
            admission=policy,
            minimum_release=checked_release(minimum_release),
            mirrors=checked_mirrors(mirror),
            reference=None if reference is None else read_reference(reference),
        ),
        doors=doors,
        relay=relay,
        report=report,
        ends_with_run=ends_with_run,
        eval_tasks=checked_tasks(eval_tasks),
        track=tuple(map(TrackerPlace.of, dict.fromkeys(track))),
    )
    place = None if archive is None else open_place(archive)
    root = (folder or manifest.with_suffix("")).absolute()
    if not RunFolder(root).settings.exists():
        ask_whether_to_start(freeze(read, assumed_data(read), ()), show, anyway=yes or as_json)
    with HeldRun(root) as held:
        prepared = prepare_run(
            read,
            root,
            lambda text: show({"event": "preparing", "what": text}),
            place,
        )
        run(lambda stop: Hosting(settings, held, show).run(prepared, stop))


def _step_line(event: dict[str, Any]) -> str:
    """Where the run is, for a person who looks at it now and then."""
    said = [f"{'window' if event['local_steps'] > 1 else 'step'} {event['version']} of {event['total_steps']}"]
    if event["loss"] is not None:
        said.append(f"loss {event['loss']:.3f}")
    if event["tokens_per_s"]:
        said.append(f"{event['tokens_per_s']:,.0f} tokens/s")
    said.append(f"{event['peers']} {'peer' if event['peers'] == 1 else 'peers'}")
    if event["left_s"] is not None:
        said.append(f"{duration_text(event['left_s'])} left")
    return ", ".join(said)


class _Shown:
    """Events for a person, a line each, or for a script as JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a file whose disk is full, or a reader that is gone, must not end the run
            self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        if self._as_json:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
            return
        match event:
            case {"event": "verdict", "verdict": verdict}:
                click.echo(wrapped(verdict))
            case {"event": "preparing", "what": what}:
                click.echo(wrapped(what))
            case {"event": "listening", "invite": invite, "run_id": run_id}:
                if event["admission"] == "ticket":
                    click.echo(f"run {run_id[:12]}: make invites with\n    swarm ticket create {event['folder']}")
                else:
                    click.echo(f"run {run_id[:12]}: join with\n    swarm join '{invite}'")
                if event["web"] is not None:
                    click.echo(f"watch it at {event['web']}")
            case {"event": "relay", "carried_bytes": carried, "budget_bytes": budget}:
                state = "relays" if carried < budget else "relays no more"
                click.echo(f"{state} for peers that cannot be dialled: {carried / 1e9:.2f} of {budget / 1e9:g} GB used")
            case {"event": "unverified", "address": address}:
                click.echo(f"{address} does not answer from here; have somebody outside try it before you invite")
            case {"event": "waiting", "missing": missing} if missing:
                wanted = ", ".join(f"{count} of stage {stage}" for stage, count in missing.items())
                click.echo(f"waiting for peers: {wanted}")
            case {"event": "version"}:
                click.echo(_step_line(event))
            case {"event": "evaluation", "version": version, "held_out_loss": loss}:
                click.echo(f"held-out loss at version {version}: {loss:.4f} nats a token")
            case {"event": "scores", "version": version, "scores": scores}:
                told = ", ".join(f"{task} {metric} {value:.4f}" for task, metric, value in scores)
                click.echo(f"tasks at version {version}: {told}")
            case {"event": "not_scored", "version": version, "reason": reason}:
                click.echo(f"version {version} was not tried at its tasks: {reason}")
            case {"event": "checkpoint", "path": path}:
                click.echo(f"checkpoint {path}")
            case {"event": "archived", "version": version, "url": url}:
                click.echo(f"checkpoint {version} is at {url}")
            case {"event": "not_archived", "reason": reason}:
                click.echo(f"{reason}; tried again")
            case {"event": "not_tracked", "to": to, "reason": reason}:
                click.echo(f"{to} does not take the run's figures: {reason}; tried again, and nothing is lost")
            case {"event": "tracked_again", "to": to}:
                click.echo(f"{to} has all of the run's figures again")
            case {"event": "disk_full", "reason": reason}:
                click.echo(f"{reason}; the swarm trains on without this host, which goes on by itself then")
            case {"event": "notice"}:
                click.echo(wrapped(line_of(event)))
            case {"event": "rolled_back", "from": before, "to": to, "version": version}:
                click.echo(f"rolled back from version {before} to {to}; the run goes on as version {version}")
            case {"event": "amending", "version": version, "changes": changes}:
                click.echo(f"to be amended at version {version}: {'; '.join(changes)}")
            case {"event": "amended", "version": version, "changes": changes}:
                click.echo(f"amended from version {version} on: {'; '.join(changes)}")
            case {"event": "continued", "to": to, "version": version, "again": again}:
                as_another = "" if version == to else f", as version {version}"
                lost = f"{again} {'step is' if again == 1 else 'steps are'} done again" if again else "nothing is lost"
                click.echo(f"stages continue from version {to}{as_another}; {lost}")
            case {"event": "paused", "stage": stage, "version": version}:
                click.echo(f"everybody of stage {stage} has left, at version {version}: the run waits for them")
            case {"event": "posted", "peer_id": peer, "from": source, "stage": stage, "reason": reason}:
                click.echo(f"{peer[-8:]} is posted from stage {source} to stage {stage}: {reason}")
            case {"event": "handed_over", "stage": stage, "version": version}:
                click.echo(f"the last peer of stage {stage} has left its state of version {version} here")
            case {"event": "over", "checkpoint": checkpoint, "held_out_loss": loss, "invite": invite}:
                fell = "" if None in loss.values() else f": held-out loss {loss['start']:.3f} to {loss['end']:.3f}"
                click.echo(wrapped(f"the run is over{fell}; this host goes on serving what came of it until Ctrl-C"))
                what = "adapters" if event["adapters"] else "model"
                if checkpoint is not None:
                    click.echo(f"take it from here:     swarm export {Path(checkpoint).parent} {what}")
                click.echo(f"or from anywhere else: swarm pull '{invite}' {what}")
                if event["adapters"]:
                    click.echo("with --base MODEL, the folder that the run began from, either makes a whole model")
            case {"event": "stopped", "version": version, "total_steps": total}:
                click.echo(
                    f"stopped at step {version} of {total}: the swarm trains on; the same line takes the run up again"
                )
            case {"event": "joined" | "left" as what, "stage": stage, "peer_id": peer}:
                click.echo(f"{peer[-8:]} {what} stage {stage}")
