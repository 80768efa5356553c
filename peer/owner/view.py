"""A daemon's status as text for a person: a page for `swarm status`, a live one for `swarm top`."""

import sys
from collections import Counter
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swarm.core.owner.limits import NONE
from swarm.network.transport import Way
from swarm.proto import daemon_pb2 as pb
from swarm.readable import count_text, duration_text, size_text

STYLES = {
    "working": "bold green",
    "paused": "bold yellow",
    "away": "bold yellow",
    "leaving": "bold yellow",
    "ended": "bold red",
}
BAR = 20
"""Characters."""


def show_status(told: pb.Status) -> None:
    """Print the page once."""
    Console(highlight=False, soft_wrap=False).print(page(told))


def show_top(statuses: Iterator[pb.Status]) -> None:
    """Show each status in place of the one before, until there are no more."""
    console = Console(highlight=False)
    with Live(console=console, screen=sys.stdout.isatty(), auto_refresh=False) as live:
        for told in statuses:
            live.update(Group(page(told), Text("Ctrl-C ends this view, not the daemon", style="dim")), refresh=True)


def page(told: pb.Status) -> RenderableType:
    """All of a status, at 80 columns."""
    parts: list[RenderableType] = []
    for number, peer in enumerate(told.peers):
        parts.append(_headline(peer, told.uptime_s if not number else None))
        parts.append(_rows([*(_place(peer) + _work(peer) if peer.HasField("work") else []), *_reached(peer)]))
    parts += [Text("together", style="bold")] if len(told.peers) > 1 else []
    parts.append(_rows(_machine(told)))
    held = [limit for limit in told.limits if limit.value != NONE]
    if held:
        parts += [Text("limits in force", style="bold"), _rows([(one.name, _limit(one)) for one in held])]
    return Group(*parts)


def _headline(peer: pb.Peer, uptime_s: float | None) -> Text:
    """`uptime_s`: of the daemon, with its first peer."""
    text = Text(f"{peer.name}  " if peer.name else "", style="bold")
    text.append(f"{peer.state.upper()}  ", style=STYLES.get(peer.state, "bold cyan"))
    if peer.run_name:
        text.append(f"{peer.run_name} ", style="bold")
        text.append(f"({peer.run_id[:12]})  ", style="dim")
    if uptime_s is not None:
        text.append(f"up {duration_text(uptime_s)}", style="dim")
    if peer.reason:
        text.append(f"\n{peer.reason}")
    elif peer.state == "working":
        text.append(f"\n{_verdict(peer)}")
    return text


def _verdict(told: pb.Peer) -> str:
    """The answer to "is my machine useful?"."""
    work, place = told.work, told.place
    if place.local_steps:
        inner = f"inner step {place.inner_steps_taken} of {place.local_steps}"
        ago = "" if work.since_last_s < 0 else f"; the last one counted {duration_text(work.since_last_s)} ago"
        return f"Useful: window {place.version}, {inner}{ago}."
    if work.since_last_s < 0:
        return "Useful from the next certified step on: nothing of its work is certified yet."
    return f"Useful: its neighbours signed for work it did {duration_text(work.since_last_s)} ago."


def _place(told: pb.Peer) -> list[tuple[str, RenderableType]]:
    place = told.place
    if place.is_member:
        members = "its only member" if place.num_members == 1 else f"one of {place.num_members} members"
    else:
        members = f"{_members(place.num_members)}, not yet one"
    return [
        ("stage", Text(f"{place.stage} of {place.num_stages} (counted from 0), {members}")),
        *_progress(place),
        ("standing", Text(place.standing)),
    ]


def _members(number: int) -> str:
    return f"{number} {'member' if number == 1 else 'members'}"


def _answering(number: int) -> str:
    return "1 peer answers" if number == 1 else f"{number} peers answer"


def _progress(place: pb.Place) -> list[tuple[str, RenderableType]]:
    done = _bar(place.version, place.total_steps, f"{place.version} of {place.total_steps}")
    if not place.local_steps:
        return [("step", done)]
    left = (
        ""
        if place.window_left_s < 0
        else f"; next round in {duration_text(place.window_left_s)}, or when others are through"
    )
    inner = f"{place.inner_steps_taken} of {place.local_steps}{left}"
    return [("window", done), ("inner step", _bar(place.inner_steps_taken, place.local_steps, inner))]


def _work(told: pb.Peer) -> list[tuple[str, RenderableType]]:
    work, audits = told.work, told.audits
    step = "window" if told.place.local_steps else "step"
    share = f"{100 * work.last_step_tokens / work.last_step_all_tokens:.0f} %" if work.last_step_all_tokens else "-"
    certified = f"{work.certified_microbatches:,} microbatches, {count_text(work.certified_tokens)} tokens"
    rank = f"{_ordinal(work.rank)} of {work.num_ranked} in its stage" if work.rank else "none yet"
    rows: list[tuple[str, RenderableType]] = [
        ("certified work", Text(f"{certified}, {count_text(work.tokens_per_s)} tokens/s")),
        (f"last {step}", _bar(work.last_step_tokens, work.last_step_all_tokens, f"{share} of {step} {work.last_step}")),
        ("rank", Text(f"{rank}, since it was started")),
        ("audits", Text(f"{audits.passed} of its work passed; {audits.made} made, {audits.frauds_found} frauds found")),
    ]
    if told.HasField("credit"):
        credit = told.credit
        place = f", {_ordinal(credit.rank)} of {credit.num_ranked} in the run" if credit.rank else ""
        done = f"{count_text(credit.tokens)} tokens in {credit.steps:,} steps{place} (host's ledger)"
        rows.insert(2, ("credit", Text(done)))
    return rows


def _reached(told: pb.Peer) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [
        ("neighbours", Text(f"{_answering(told.num_neighbours)}{_links(told)}")),
        ("device", Text(told.device)),
        ("reach", Text(f"{told.reach.kind}: {told.reach.why}")),
        ("peer", Text(told.peer_id, style="dim")),
    ]
    shown = {"neighbours": told.HasField("work"), "device": bool(told.device), "reach": told.HasField("reach")}
    return [row for row in rows if shown.get(row[0], True)]


def _machine(told: pb.Status) -> list[tuple[str, RenderableType]]:
    traffic, machine = told.traffic, told.machine
    return [
        ("traffic", Text(f"{traffic.up_mbit:.1f} Mbit/s up, {traffic.down_mbit:.1f} down, "
                         f"{size_text(traffic.month_bytes)} this month")),
        ("machine", Text(f"{machine.cpu_cores:.1f} cores, {size_text(machine.memory_bytes)} memory, "
                         f"{size_text(machine.disk_bytes)} disk")),
    ]  # fmt: skip


def _links(told: pb.Peer) -> str:
    """How many of them are reached how."""
    counted = Counter(link.way for link in told.links)
    return (
        f" ({', '.join(f'{counted[way]} {way}' for way in (kind.value for kind in Way) if counted[way])})"
        if counted
        else ""
    )


def _limit(limit: pb.Limit) -> Text:
    text = Text(limit.value)
    if limit.used:
        text.append(f"   now {limit.used}", style="dim")
    return text


def _rows(rows: list[tuple[str, RenderableType]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=14, no_wrap=True)
    table.add_column()
    for title, value in rows:
        table.add_row(title, value)
    return Padding(table, (0, 0, 0, 2))


def _bar(part: int, whole: int, text: str) -> Text:
    full = round(BAR * min(1.0, part / whole)) if whole else 0
    return Text.assemble(("█" * full, "green"), ("░" * (BAR - full), "dim"), f"  {text}")


def limits_table(told: pb.Limits) -> str:
    """All limits for `swarm config`, as lines."""
    names = max(len(limit.name) for limit in told.limits)
    values = max(len(limit.value) for limit in told.limits)
    lines = []
    for limit in told.limits:
        notes = [f"now {limit.used}"] if limit.used else []
        notes += ["a change holds from the next start"] if limit.at_next_start else []
        lines.append(f"{limit.name:<{names}}  {limit.value:<{values}}  {limit.meaning}")
        lines += [f"{'':<{names}}  {'':<{values}}    {'; '.join(notes)}"] if notes else []
    return "\n".join(lines) + "\n"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
