"""`swarm init`: writes an example manifest, or one that goes on from a checkpoint."""

from pathlib import Path
from typing import Any

import click

from swarm.core.errors import SettingsError
from swarm.manifest.default import default_manifest_text

NO_TEXT = "while that is empty, it is the source code of Python's standard library"


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("run.toml"))
@click.option("--stages", type=click.IntRange(1, 1024), help="Pieces the model is cut into; 1: whole on each peer.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="Start from this Hugging Face model, with its tokenizer if the folder has one.",
)
@click.option(
    "--lora",
    type=click.IntRange(1, 1024),
    metavar="RANK",
    help="Train adapters of this rank (LoRA) on the frozen model, not the model itself.",
)
@click.option("--qlora", is_flag=True, help="With --lora: keep the frozen model in 4 bits (NF4).")
def command(path: Path, stages: int | None, checkpoint: Path | None, lora: int | None, qlora: bool) -> None:
    """Write an example manifest to PATH (run.toml). An existing file is never overwritten."""
    model: dict[str, Any] = {} if stages is None else {"stages": stages}
    lines: list[str] = []
    if qlora and lora is None:
        raise SettingsError("--qlora is of adapters; give --lora RANK too, such as --lora 16")
    if checkpoint is None:
        text = default_manifest_text({"model": model, **_adapters(lora, qlora)})
    else:
        from swarm.manifest.checkpoint import fields_from, what_was_read
        from swarm.manifest.file import parse_manifest

        text = default_manifest_text({**fields_from(checkpoint.absolute(), model), **_adapters(lora, qlora)})
        lines = what_was_read(parse_manifest(text, path))
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise SettingsError(f'PATH = "{path}" exists; give another name, or move it away first') from error
    except OSError as error:
        raise SettingsError(f'PATH = "{path}" cannot be written ({error.strerror}); give another folder') from error
    for line in lines:
        click.echo(line)
    if checkpoint is not None:
        click.echo(
            f'wrote {path}; next: say there what it is trained on, in data.text (conversations: data.kind = "chat")'
        )
        click.echo(f"{NO_TEXT}; then: swarm plan {path}")
    else:
        click.echo(f"wrote {path}; next: swarm plan {path}")


def _adapters(lora: int | None, qlora: bool) -> dict[str, dict[str, Any]]:
    """Of a manifest's tables, what adapters ask for; nothing where the whole model is trained."""
    if lora is None:
        return {}
    return {
        "adapters": {"rank": lora, "alpha": 2.0 * lora, "base": "nf4" if qlora else "plain"},
        "optimizer": {"learning_rate": 2e-4, "weight_decay": 0.0},
    }
