"""`swarm init`: writes an example manifest."""

from pathlib import Path

import click

from swarm.core.errors import SettingsError
from swarm.manifest.default import default_manifest_text


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("run.toml"))
def command(path: Path) -> None:
    """Write an example manifest to PATH (run.toml). An existing file is never overwritten."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(default_manifest_text())
    except FileExistsError as error:
        raise SettingsError(f'PATH = "{path}" exists; give another name, or move it away first') from error
    except OSError as error:
        raise SettingsError(f'PATH = "{path}" cannot be written ({error.strerror}); give another folder') from error
    click.echo(f"wrote {path}; next: swarm plan {path}")
