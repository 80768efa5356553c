"""What the user keeps of a finished demo: report, picture, model, and a text it wrote."""

import asyncio
import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bootstrap.demo.alone import held_out_alone
from bootstrap.demo.observed import short
from bootstrap.demo.outcome import honest_out, of_attacker
from bootstrap.demo.plot import write_loss_plot
from bootstrap.demo.report import demo_report, read_host_report, write_report
from bootstrap.demo.request import CHECKPOINT_EVERY
from bootstrap.demo.run import EVALUATE_TOKENS, Demo
from bootstrap.demo.view import shown_path
from swarm.checkpoint.archive import latest_checkpoint
from swarm.checkpoint.huggingface import export_huggingface, generate

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 200
PROMPT_BYTES = 24


@dataclass
class Kept:
    """What a demo leaves behind."""

    report: dict[str, Any]
    checkpoint: Path | None
    plot: Path | None = None
    model: Path | None = None
    prompt: str = ""
    sample: str = ""


async def keep(demo: Demo, say: Callable[[str], None], *, wall_s: float, export: bool) -> Kept:
    """Write the picture, with `export` the model and a sample of its text, and the reports.

    Where a run in windows has ended it is also held against one member that trains alone.
    """
    folder = demo.prepared.folder
    latest = await asyncio.to_thread(latest_checkpoint, folder.checkpoints)
    kept = Kept(read_host_report(folder.host_report), latest.path if latest is not None else None)
    losses = [(int(step), float(loss)) for step, loss in kept.report.get("loss", [])] or demo.observed.loss()
    if len(losses) > 1:
        say("drawing the loss")
        await asyncio.to_thread(
            write_loss_plot,
            folder.plot,
            losses,
            held_out=demo.observed.held_out,
            bigram=demo.bigram,
            kills=demo.observed.kills,
            title=_plot_title(demo),
        )
        kept.plot = folder.plot
    if export and kept.checkpoint is not None:
        say("exporting the model")
        await asyncio.to_thread(export_huggingface, kept.checkpoint, folder.model)
        kept.model, kept.prompt = folder.model, _prompt(demo)
        say("letting it write")
        kept.sample = await asyncio.to_thread(_sample, folder.model, kept.prompt)
    alone = None
    if export and demo.observed.local_steps > 1:
        say("training one member alone, for comparison")
        steps = demo.observed.num_steps
        alone = await asyncio.to_thread(held_out_alone, demo.prepared, windows=steps, evaluate_tokens=EVALUATE_TOKENS)
    request = demo.prepared.request
    kept.report = demo_report(
        kept.report,
        exits={peer_id: program.exit for peer_id, program in demo.peers.items()},
        stages={peer_id: peer.stage for peer_id, peer in demo.observed.peers.items()},
        kills=demo.kills,
        bigram=demo.bigram,
        alone=alone,
        export_dir=kept.model,
        extra={
            "out": str(folder.root),
            "plot": str(kept.plot) if kept.plot is not None else None,
            "checkpoint": str(kept.checkpoint) if kept.checkpoint is not None else None,
            "wall_seconds": wall_s,
            "attacks": _attacks(demo, kept.report),
            "honest_shut_out": honest_out(demo.observed),
            "bans": demo.observed.bans,
            "host_exit": demo.host.exit if demo.host is not None else None,
        },
    )
    for path in (folder.report, *([request.report] if request.report is not None else [])):
        await asyncio.to_thread(write_report, path, kept.report)
    return kept


def show(console: Console, demo: Demo, kept: Kept, *, wall_s: float) -> None:
    """The closing table: figures, what the model writes, paths, and how to go on."""
    folder = demo.prepared.folder
    console.print()
    if kept.sample:
        text = Text(kept.prompt, style="bold")
        text.append(_harmless(kept.sample), "none")
        console.print(Panel(text, title="what the model writes", title_align="left", border_style="dim"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in _figures(demo, kept.report, wall_s):
        table.add_row(title, value)
    for title, path in (("loss curve", kept.plot), ("report", folder.report), ("logs", folder.logs)):
        if path is not None:
            table.add_row(title, shown_path(path))
    table.add_row("checkpoint", shown_path(kept.checkpoint) if kept.checkpoint is not None else _no_checkpoint(demo))
    console.print(table)
    console.print("\nGo on:", style="bold")
    for what, command in _commands(demo, kept):
        console.print(Text(f"  # {what}", style="dim"))
        console.print(Text(f"  {command}"), soft_wrap=True)


def _figures(demo: Demo, report: dict[str, Any], wall_s: float) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = []
    held_out = report["held_out_loss"]
    start, end, bigram = held_out["start"], held_out["end"], held_out["bigram"]
    if start is not None and end is not None:
        loss = Text(f"{start:.3f} before, ")
        loss.append(f"{end:.3f} after", style="bold green" if bigram is not None and end < bigram else "bold")
        rows.append(("held-out loss", loss.append(f"; byte bigram {bigram:.3f} (nats a byte)")))
    if held_out["alone"] is not None:
        steps = f"{demo.observed.num_steps * demo.observed.local_steps:,} inner steps, as many as each of them took"
        rows.append(("beside one process", f"{held_out['alone']:.3f}, one member alone after {steps}"))
    word = demo.observed.word
    inner = f" of {demo.observed.local_steps} inner steps" if demo.observed.local_steps > 1 else ""
    if report.get("seconds"):
        speed = f"{report['tokens']:,} tokens in {report['seconds']:.0f} s: {report['tokens_per_s']:,.0f} tokens/s"
        rows.append(("trained", f"{_count(report['steps'], word)}{inner}, {speed}"))
    rounds = [seconds for _, seconds in report.get("round_seconds", [])]
    if rounds:
        sent = statistics.median(size for _, size in report["round_bytes"])
        hidden = "" if inner else f", {report['overlap']:.0%} of them behind computing"
        each = f"{statistics.median(rounds):.2f} s and {sent / 1e6:.2f} MB a {word}"
        rows.append(("rounds", f"{each} (medians){hidden}"))
    for peer_id, version in demo.kills.items():
        stage = demo.observed.peers[peer_id].stage
        rows.append(("killed", f"{short(peer_id)} of stage {stage} at {word} {version}, by kill -9"))
    if demo.kills and report.get("seconds"):
        rows.append(
            (
                "what that cost",
                f"{_count(report['reassigned_microbatches'], 'microbatch', 'es')} sent again, "
                f"{report['lost_microbatches']} lost; "
                f"{_count(report['lost_contributions'], 'window' if inner else 'gradient sum')} lost",
            )
        )
    for attack in report["attacks"]:
        rows.append(("misbehaved", f"{short(attack['peer_id'])}: {attack['kind']} from step {attack['step']}"))
        rows.append(("what came of it", attack["outcome"]))
    if report["attacks"]:
        wronged = report["honest_shut_out"]
        rows.append(("the others", Text("; ".join(wronged), style="bold red") if wronged else "nobody was shut out"))
    for ban in report["bans"]:
        rows.append(("banned", f"{short(ban['peer_id'])} for {ban['kind']} at step {ban['step']}: {ban['evidence']}"))
    for stage, digests in report.get("state_digests", {}).items():
        values = sorted(set(digests.values()))
        if len(values) == 1:
            rows.append((f"stage {stage}", f"{_count(len(digests), 'peer')} ended with state {values[0][:16]}"))
        else:
            rows.append((f"stage {stage}", Text(f"peers ended with {len(values)} different states", style="bold red")))
    if report.get("wire_bytes"):
        rows.append(("sent", f"{report['wire_bytes'] / 1e6:,.0f} MB between the peers"))
    rows.append(("in all", f"{wall_s:.0f} s"))
    return rows


def _attacks(demo: Demo, host: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "peer_id": peer_id,
            "stage": peer.stage,
            "kind": peer.attack.kind,
            "step": peer.attack.from_step,
            "outcome": of_attacker(demo.observed, peer, host),
        }
        for peer_id, peer in sorted(demo.observed.peers.items())
        if peer.attack is not None
    ]


def _commands(demo: Demo, kept: Kept) -> list[tuple[str, str]]:
    folder = demo.prepared.folder
    found = []
    proofs = [ban["evidence"] for ban in demo.observed.bans if isinstance(ban["evidence"], str)]
    if proofs:
        found.append(("judge a ban yourself, with no network", f"swarm evidence verify {shown_path(Path(proofs[0]))}"))
    if kept.model is not None:
        found.append(("let the model write", f"swarm generate {shown_path(kept.model)} {shlex.quote(kept.prompt)}"))
    elif kept.checkpoint is not None:
        target = shown_path(folder.model)
        found.append(("turn the checkpoint into a model", f"swarm export {shown_path(kept.checkpoint)} {target}"))
    if demo.observed.version >= demo.observed.num_steps:
        again = f"swarm host {shown_path(folder.manifest)} --dir {shown_path(folder.root / 'again')}"
        found.append(("host this run again, for peers on any machines", again))
    else:
        again = f"swarm host {shown_path(folder.manifest)} --dir {shown_path(folder.run)}"
        found.append(("host the rest of the run, for peers on any machines", again))
    found.append(("on each of them, with the address that the host prints", "swarm join ADDRESS"))
    return found


def _harmless(text: str) -> str:
    """The text without anything a terminal would act on, or a font has no sign for."""
    return "".join(
        letter if letter == "\n" or (letter.isprintable() and letter != "\ufffd") else "·" for letter in text
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _no_checkpoint(demo: Demo) -> str:
    return f"none: the first is written at step {min(CHECKPOINT_EVERY, demo.observed.num_steps)}"


def _plot_title(demo: Demo) -> str:
    request = demo.prepared.request
    return f"{request.shape}, {demo.observed.tokens_per_step:,} tokens a {demo.observed.word}"


def _prompt(demo: Demo) -> str:
    """The start of the held-out text, where the user gave one: what the model writes is then of its kind."""
    if not demo.prepared.request.text:
        return SAMPLE_PROMPT
    held_out = demo.prepared.data.held_out()
    first = bytes(int(token) for token in held_out.read(0, min(PROMPT_BYTES, len(held_out))))
    return first.decode(errors="ignore") or SAMPLE_PROMPT


def _sample(model: Path, prompt: str) -> str:
    return "".join(generate(model, prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0.7, seed=0))
