"""`swarm export`: turns a checkpoint into a model folder."""

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of a tokenizer.  [default: the checkpoint's]",
)
def command(checkpoint: Path, folder: Path, tokenizer: Path | None) -> None:
    """Write CHECKPOINT as a Hugging Face model to FOLDER, which must be new or empty.

    CHECKPOINT is one checkpoint, or a folder of them: then the latest is taken.
    """
    from swarm.checkpoint.archive import INFO_FILE, latest_checkpoint
    from swarm.checkpoint.huggingface import export_huggingface

    latest = None if (checkpoint / INFO_FILE).is_file() else latest_checkpoint(checkpoint)
    export_huggingface(checkpoint if latest is None else latest.path, folder, tokenizer_dir=tokenizer)
    click.echo(f'wrote {folder}; try it: swarm generate {folder} "def main():"')
