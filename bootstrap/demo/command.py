"""`swarm demo`: one command line becomes a swarm on this machine, watched until it has learned."""

import asyncio
import time
from pathlib import Path
from typing import Any

import click

from swarm.cli import ExitCode
from swarm.core.errors import LocalError, SettingsError

DEFAULT_STEPS = 240


@click.command(name="demo", short_help="Train a small model with a swarm on this machine.")
@click.option(
    "--stages", type=click.IntRange(min=1), default=2, show_default=True, help="Pieces the model is cut into."
)
@click.option(
    "--peers", type=click.IntRange(min=1, max=64), default=4, show_default=True, help="Peers, over all stages."
)
@click.option(
    "--steps",
    type=click.IntRange(min=2, max=1_000_000),
    help=f"Default: {DEFAULT_STEPS}, or fewer with --local-steps, as many in all.",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH...",
    help="Files and folders to train on. Default: the source code of Python's standard library.",
)
@click.argument("more_texts", type=click.Path(path_type=Path), nargs=-1, metavar="")
@click.option("--seed", type=click.IntRange(min=0, max=(1 << 63) - 1), default=0, show_default=True)
@click.option(
    "--kill", metavar="N@STEP", help="Kill N peers (kill -9) at STEP. Default: 1 at 40 % of the run; 0@0 kills none."
)
@click.option(
    "--attack",
    "attacks",
    multiple=True,
    metavar="KIND:COUNT@STEP",
    help="Let COUNT peers misbehave from STEP on, such as sign_flip:1@10. May be given several times.",
)
@click.option(
    "--delay",
    type=click.IntRange(min=0, max=1),
    default=0,
    show_default=True,
    help="1: go on computing while gradients are averaged, on weights one step old.",
)
@click.option(
    "--local-steps",
    type=click.IntRange(min=1, max=1024),
    default=1,
    show_default=True,
    help="With --stages 1: steps that each peer takes by itself between two rounds; --steps counts rounds.",
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Processor threads per peer.")
@click.option("--out", type=click.Path(path_type=Path), help="A new or empty folder. Default: a new one in ./demo-out.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the figures here, too, as JSON.")
def command(
    stages: int,
    peers: int,
    steps: int | None,
    texts: tuple[Path, ...],
    more_texts: tuple[Path, ...],
    seed: int,
    kill: str | None,
    attacks: tuple[str, ...],
    delay: int,
    local_steps: int,
    threads: int,
    out: Path | None,
    report: Path | None,
) -> ExitCode:
    """Train a small model with a swarm on this machine: a host and peers each a process of its own.

    Works offline. One peer is killed on the way, and the others go on. Ctrl-C stops it in order.
    """
    from bootstrap.demo import request as asked
    from swarm.network.loop import run

    if more_texts and not texts:
        raise SettingsError(f"{more_texts[0]}: what is it? give the text to train on as --text {more_texts[0]}")
    steps = steps if steps is not None else max(2, DEFAULT_STEPS // local_steps)
    has_default_kill = kill is None and peers > stages
    chosen = asked.check(
        asked.DemoRequest(
            stages=stages,
            peers=peers,
            steps=steps,
            kill=asked.parse_kill(kill if kill is not None or has_default_kill else "0@0", steps),
            attacks=tuple(map(asked.parse_attackers, attacks)),
            text=texts + more_texts,
            seed=seed,
            delay=delay,
            local_steps=local_steps,
            threads=threads,
            out=out or asked.default_out(),
            report=report,
        )
    )
    started_at = time.monotonic()
    prepared = asked.prepare(chosen)
    return run(lambda stop: conduct(prepared, stop, started_at))


async def conduct(prepared: Any, stop: asyncio.Event, started_at: float) -> ExitCode:
    """Run the demo and show what came of it. Raises LocalError when it failed."""
    from rich.console import Console

    from bootstrap.demo.observed import Observed
    from bootstrap.demo.run import Demo, Ending, failure_text
    from bootstrap.demo.view import shown_path, view

    request = prepared.request
    console = Console(highlight=False)
    demo = Demo(prepared, Observed(request.steps, request.tokens_per_step, started_at, local_steps=request.local_steps))
    title = f"swarm demo: {request.shape}, into {shown_path(request.out)}"
    with view(console, title, prepared.folder.address) as shown:
        ending = await demo.run(shown, stop)

    def wall_s() -> float:
        return time.monotonic() - started_at

    from bootstrap.demo import closing  # brings torch: not before the host has started

    with console.status("closing") as status:
        kept = await closing.keep(
            demo, lambda text: status.update(f"{text} ..."), wall_s=wall_s(), export=ending is Ending.DONE
        )
    closing.show(console, demo, kept, wall_s=wall_s())
    if ending is Ending.FAILED:
        raise LocalError(failure_text(demo))
    return ExitCode.OK if ending is Ending.DONE else ExitCode.INTERRUPTED
