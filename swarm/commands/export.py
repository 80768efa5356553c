"""`swarm export`: turns a checkpoint into a model folder."""

from pathlib import Path

import click

BASE = click.option(
    "--base",
    type=click.Path(path_type=Path),
    default=None,
    help="Of adapters: merge them into this, the model folder that the run began from or the host's model.base.",
)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of a tokenizer.  [default: the checkpoint's]",
)
@BASE
def command(checkpoint: Path, folder: Path, tokenizer: Path | None, base: Path | None) -> None:
    """Write CHECKPOINT as a Hugging Face model to FOLDER, which must be new or empty; of adapters, for peft to load.

    CHECKPOINT is one checkpoint, or a folder of them: then the latest is taken.
    """
    from swarm.checkpoint.archive import INFO_FILE, latest_checkpoint
    from swarm.checkpoint.huggingface import export_huggingface

    latest = None if (checkpoint / INFO_FILE).is_file() else latest_checkpoint(checkpoint)
    export_huggingface(checkpoint if latest is None else latest.path, folder, tokenizer_dir=tokenizer, base=base)
    click.echo(f"wrote {folder}; {what_next(folder)}")


def what_next(folder: Path) -> str:
    """With an exported folder."""
    from swarm.checkpoint.adapters import CONFIG

    if (folder / CONFIG).exists():
        return "load it onto its base with peft, or do this again with --base MODEL for a model by itself"
    if (folder / "chat_template.jinja").exists():
        return f'try it: swarm generate {folder} --chat "Who are you?"'
    return f'try it: swarm generate {folder} "def main():"'
