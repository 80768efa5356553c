"""`swarm init`: writes an example manifest."""

from pathlib import Path
from typing import Any

import click

from swarm.core.errors import SettingsError
from swarm.manifest.default import default_manifest_text


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("run.toml"))
@click.option("--stages", type=click.IntRange(1, 1024), help="Pieces the model is cut into; 1: whole on each peer.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="Start from this Hugging Face model, with its tokenizer if the folder has one.",
)
def command(path: Path, stages: int | None, checkpoint: Path | None) -> None:
    """Write an example manifest to PATH (run.toml). An existing file is never overwritten."""
    model: dict[str, Any] = {} if stages is None else {"stages": stages}
    data: dict[str, Any] = {}
    if checkpoint is not None:
        model |= {"preset": None, "checkpoint": str(checkpoint.absolute())}
        if (checkpoint / "tokenizer.json").is_file():
            data["tokenizer"] = model["checkpoint"]
    text = default_manifest_text({"model": model, "data": data})
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise SettingsError(f'PATH = "{path}" exists; give another name, or move it away first') from error
    except OSError as error:
        raise SettingsError(f'PATH = "{path}" cannot be written ({error.strerror}); give another folder') from error
    click.echo(f"wrote {path}; next: swarm plan {path}")
