"""A person is asked once, where there is one to ask."""

import sys

import click

DECLINED = 130
"""Exit code of who says no."""


def ask(question: str, *, unasked: str) -> None:
    """Raises click's Exit when the answer is no, UsageError with `unasked`, what to do, when there is nobody to ask."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"nobody can be asked here: {unasked}")
    if not click.confirm(question):
        raise click.exceptions.Exit(DECLINED)
