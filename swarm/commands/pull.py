"""`swarm pull`: takes a model away, the newest anchored checkpoint, checked, as a Hugging Face folder."""

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.commands.export import BASE, what_next

if TYPE_CHECKING:
    from swarm.checkpoint.record import ArchivedFile, CheckpointRecord
    from swarm.manifest.signed_run import SignedRun
    from swarm.network.services.coordinator_client import CoordinatorClient

TRIES = 5


@click.command()
@click.argument("invite")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--keep-checkpoint",
    type=click.Path(path_type=Path),
    help="Keep the whole checkpoint in this folder, with what training goes on from.",
)
@BASE
def command(invite: str, folder: Path, keep_checkpoint: Path | None, base: Path | None) -> None:
    """Fetch the newest anchored checkpoint of INVITE's run and write it to FOLDER, for transformers to load; of
    adapters, for peft.

    No peer is needed, nor is any trusted: the run key that INVITE names has signed every digest.
    """
    from swarm.checkpoint.archive import is_optimizer_file
    from swarm.checkpoint.huggingface import export_huggingface
    from swarm.invite import parse_invite
    from swarm.network.services.coordinator_client import coordinator_client

    read = parse_invite(invite)
    folder = folder.absolute()
    check_empty(folder)
    if keep_checkpoint is not None:
        check_empty(keep_checkpoint)
    partial = folder.with_name(
        f".{folder.name}.{read.run_id[:12]}"
    )  # of the same run: what is whole is not asked again
    with coordinator_client(read) as client:
        signed, _ = client.run()
        record = begun_or_newest(anchored(client), partial)
        fetched = partial / str(record.version)
        wanted = [file for file in record.files if keep_checkpoint is not None or not is_optimizer_file(file.name)]
        total_bytes = sum(file.size_bytes for file in wanted)
        click.echo(f"checkpoint {record.version}: {len(wanted)} files, {total_bytes / 1e6:.1f} MB")
        check_room(partial, total_bytes)
        for file in wanted:
            fetch(client, record, file, fetched / file.name)
    check_states(record, fetched, signed)
    export_huggingface(fetched, folder, base=base)
    if keep_checkpoint is not None:
        keep_checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if keep_checkpoint.exists():
            keep_checkpoint.rmdir()  # into a folder that is there, it would be moved
        shutil.move(fetched, keep_checkpoint)
    shutil.rmtree(partial)
    click.echo(f"{folder}: every digest is as the run key {read.run_key} signed it; {what_next(folder)}")


def check_empty(folder: Path) -> None:
    """Raises SettingsError where something would be overwritten, or lie beside what is there."""
    from swarm.core.errors import SettingsError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} is not an empty folder; give a new one, so that nothing is overwritten")


def anchored(client: "CoordinatorClient") -> list["CheckpointRecord"]:
    """The records whose states are anchored, one at least. Raises RemoteError for one that the run key did not sign."""
    from swarm.checkpoint.record import CheckpointRecord
    from swarm.core.errors import TransientError

    records = [CheckpointRecord.from_value(value) for value in client.checkpoints()]
    for record in records:
        record.check(run_id=client.invite.run_id, run_key=client.invite.run_key)
    found = [record for record in records if record.anchored]
    if not found:
        raise TransientError(
            f"the host has {len(records)} checkpoints, none of them anchored; the first comes when the run has begun "
            "and made checkpoint.every_steps steps"
        )
    return found


def begun_or_newest(records: list["CheckpointRecord"], partial: Path) -> "CheckpointRecord":
    """The one that an earlier call began in a folder of `partial`, while the host has it, else the newest: of a large
    model there would be a newer one at each try. What is there of others is removed."""
    begun = [record for record in records if (partial / str(record.version)).is_dir()]
    chosen = max(begun or records, key=lambda record: record.version)
    for other in partial.glob("*"):
        if other.name != str(chosen.version):
            shutil.rmtree(other)
    return chosen


def check_room(partial: Path, total_bytes: int) -> None:
    """Raises SettingsError where the disk has no room for the checkpoint beside what is there of it."""
    from swarm.core.errors import SettingsError

    folder = next(parent for parent in partial.parents if parent.is_dir())
    here = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if total_bytes > free + here:
        raise SettingsError(
            f"the checkpoint takes {total_bytes / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; name a FOLDER on "
            "another disk"
        )


def fetch(client: "CoordinatorClient", record: "CheckpointRecord", file: "ArchivedFile", path: Path) -> None:
    """The file at `path`, with the digest in its record; what is there already is gone on from.

    Raises RemoteError if the host sends something else, TransientError if it does not answer in TRIES tries.
    """
    from swarm.core.errors import RemoteError, TransientError

    path.parent.mkdir(parents=True, exist_ok=True)
    for left in range(TRIES - 1, -1, -1):
        found = hashlib.sha256()
        with path.open("ab+") as out:
            out.seek(0)
            while piece := out.read(1 << 20):
                found.update(piece)
            try:
                if out.tell() < file.size_bytes:
                    for data in client.download(record.version, file.name, out.tell()):
                        found.update(data)
                        out.write(data)
                        if out.tell() > file.size_bytes:
                            break
            except TransientError:
                if not left:
                    raise
                continue
        if path.stat().st_size == file.size_bytes and found.digest() == file.sha256:
            return
        path.unlink()  # of another checkpoint, or damaged: once more from the start
    raise RemoteError("digest", f"{file.name} of checkpoint {record.version} is not the one that the run key signed")


def check_states(record: "CheckpointRecord", folder: Path, signed: "SignedRun") -> None:
    """Raises RemoteError unless the checkpoint is of this run's model, and its states have the digests in the record.

    That the files hold those states is checked again when they are read.
    """
    from swarm.checkpoint.archive import read_checkpoint
    from swarm.core.errors import RemoteError

    info = read_checkpoint(folder)
    models = [signed.under(number).in_force.model for number in range(len(signed.amendments) + 1)]
    found = tuple(stage.digest for stage in info.stages)
    if (info.version, found) != (record.version, record.state_digests) or info.meta.model not in models:
        raise RemoteError("digest", f"checkpoint {record.version} holds other states than the run key signed")
