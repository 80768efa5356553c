"""The demo as it is seen: a live picture on a terminal, a plain line now and then elsewhere."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bootstrap.demo.observed import News, Observed, Peer, short

PLAIN_EVERY_S = 10.0
BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "training": "green",
    "killed": "red",
    "banned": "red",
    "failed": "red",
    "left": "yellow",
    "ready": "cyan",
}


class View(Protocol):
    """Shows a run as it goes."""

    def show(self, observed: Observed, *, now: float) -> None:
        """Something may have changed."""


@contextlib.contextmanager
def view(console: Console, title: str, address: Path) -> Iterator[View]:
    """The view that suits the console. `address`: the file that will hold the run's address."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainView(console, title)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield LiveView(console, live, title, address)


class PlainView:
    """Lines for a log: news at once, progress every PLAIN_EVERY_S."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._shown_news = 0
        self._shown_at = float("-inf")
        self._phase = ""
        self._print(title)

    def show(self, observed: Observed, *, now: float) -> None:
        phase = observed.closing or observed.phase.partition(":")[0]  # not each count of the peers that are missing
        if phase != self._phase:
            self._phase = phase
            self._print(f"{phase} ...")
        news = list(observed.news)[self._shown_news :]
        self._shown_news += len(news)
        for item in news:
            self._print(f"{clock(item.at_s)} {item.text}")
        if not observed.version or observed.began_at is None or observed.closing:
            return
        if now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now
            self._print(f"{clock(now - observed.began_at)} {progress_text(observed)}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """One picture, drawn anew each time, that fits the terminal."""

    def __init__(self, console: Console, live: Live, title: str, address: Path) -> None:
        self._console = console
        self._live = live
        self._title = title
        self._address = shown_path(address)

    def show(self, observed: Observed, *, now: float) -> None:
        self._live.update(self.picture(observed, now=now), refresh=True)

    def picture(self, observed: Observed, *, now: float) -> RenderableType:
        """Title, progress, loss curve, peers and news, in no more lines than the terminal has."""
        width, height = self._console.size
        rows: list[RenderableType] = [Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")]
        if observed.began_at is None:
            rows.append(
                Text(f"{observed.closing or observed.phase} ... {clock(now - observed.started_at)}", style="cyan")
            )
        else:
            rows.append(_progress(observed))
        rows += [_figures(observed), _curve(observed, width), Text()]
        lines_left = height - len(rows) - 3  # the table's head and rule, and the cursor's line
        num_peers = min(len(observed.peers), max(1, lines_left - 4))
        rows += [_peers(observed, num_peers), Text()]
        num_news = max(0, lines_left - num_peers - 2)
        news = _worth_a_line(observed)
        rows += [_news(item) for item in news[-num_news:]] if num_news else []
        if (
            observed.began_at is not None
            and observed.version < observed.num_steps
            and num_news > len(observed.news) + 1
        ):
            hint = f"add a peer, in another terminal: swarm join $(cat {self._address})"
            rows += [Text(), Text(hint, style="dim")]
        return Group(*rows)


def progress_text(observed: Observed) -> str:
    """One line for a log."""
    loss = observed.recent_loss()
    parts = [f"{observed.word} {observed.version}/{observed.num_steps}"]
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    parts.append(f"{observed.tokens_per_s():,.0f} tokens/s")
    left_s = observed.left_s()
    if left_s is not None:
        parts.append(f"{clock(left_s)} left")
    return ", ".join(parts)


def shown_path(path: Path) -> str:
    """A path as a user would type it from here: relative where that is shorter."""
    here = os.path.relpath(path)
    return shlex.quote(here if len(here) < len(str(path)) else str(path))


def clock(seconds: float) -> str:
    """m:ss"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _progress(observed: Observed) -> RenderableType:
    left_s = observed.left_s()
    if observed.closing or observed.version >= observed.num_steps:
        right = observed.closing or observed.phase
    else:
        right = f"{clock(left_s)} left" if left_s is not None else f"first {observed.word}"
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    table.add_row(
        f"{observed.word} {observed.version:>{len(str(observed.num_steps))}}/{observed.num_steps}",
        ProgressBar(total=observed.num_steps, completed=observed.version),
        Text(right, style="cyan"),
    )
    return table


def _figures(observed: Observed) -> Text:
    loss, bigram = observed.recent_loss(), observed.bigram_loss
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("loss ")
    if loss is not None:
        text.append(f"{loss:.3f}", style="bold green" if bigram is not None and loss < bigram else "bold")
    else:
        text.append("-")
    if bigram is not None:
        text.append(f" (byte bigram {bigram:.3f})")
    text.append(f"   {observed.tokens_per_s():,.0f} tokens/s")
    text.append(f"   {observed.version * observed.tokens_per_step:,} tokens")
    reassigned = sum(peer.reassigned for peer in observed.peers.values())
    if reassigned:
        text.append(f"   {reassigned} sent again")
    return text


def _curve(observed: Observed, width: int) -> Text:
    """The loss so far in one line, from its highest to its lowest value."""
    values = [value for _, value in observed.loss()]
    if len(values) < 2:
        return Text()
    columns = min(len(values), max(8, min(width - 12, 100)))
    bounds = [len(values) * at // columns for at in range(columns + 1)]
    shown = [fmean(values[start:stop]) for start, stop in pairwise(bounds)]
    low, high = min(shown), max(shown)
    bars = "".join(BARS[round((value - low) / max(high - low, 1e-9) * (len(BARS) - 1))] for value in shown)
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{shown[0]:.2f} ", style="dim")
    text.append(bars, style="blue")
    text.append(f" {shown[-1]:.2f}", style="dim")
    return text


def _peers(observed: Observed, most: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("peer")
    for title in ("stage", "state", "microbatches", "busy", "MB sent"):
        table.add_column(title, justify="left" if title == "state" else "right")
    ordered = sorted(observed.peers.values(), key=lambda peer: (peer.stage, not peer.is_live, peer.peer_id))
    for peer in ordered[:most]:
        gone = not peer.is_live
        table.add_row(
            Text(short(peer.peer_id)),
            str(peer.stage),
            _state(peer),
            f"{peer.microbatches:,}",
            "" if gone or observed.began_at is None else f"{peer.busy_share():.0%}",
            f"{peer.sent_bytes / 1e6:.1f}",
            style="dim" if gone else "",
        )
    return table


def _state(peer: Peer) -> Text:
    text = Text(peer.state, style=STATE_STYLES.get(peer.state, ""), no_wrap=True)
    if peer.attack is not None:
        text.append(f" {peer.attack}", style="red")
    return text


def _worth_a_line(observed: Observed) -> list[News]:
    """The news, of routine the last alone."""
    last = next((item for item in reversed(observed.news) if item.is_routine), None)
    return [item for item in observed.news if not item.is_routine or item is last]


def _news(item: News) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{clock(item.at_s):>5}  ", style="dim")
    text.append(item.text, style="red" if item.is_bad else "")
    return text
