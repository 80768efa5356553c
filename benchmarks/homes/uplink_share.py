"""How much of a line a peer's rounds used: reckoned from counts of its bytes, often taken."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MOVING_SHARE = 0.2
"""A sample in which the line carried at least this share of what it could moved bytes; votes alone do not come near."""


@dataclass(frozen=True)
class Window:
    """A round of one peer. Seconds of one clock."""

    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class UplinkShare:
    """Bytes sent as a share of what the line could carry in the same time."""

    moving: float
    """From the first to the last sample of each round that moved bytes: stalls between them count, votes do not."""
    rounds: float
    """From the close of each step to its new version."""
    run: float
    """All the time, with what was computed between rounds."""
    moving_s: float
    """Mean of a round, of the first kind."""


def uplink_share(
    times: Sequence[float], counts: Sequence[int], windows: Sequence[Window], *, bytes_per_s: float
) -> UplinkShare:
    """`counts` are bytes sent by `times`, which ascend and cover the windows. Raises ValueError if no bytes moved."""
    moved_bytes = moved_s = in_rounds_bytes = in_rounds_s = 0.0
    for window in windows:
        first, last = bisect_left(times, window.start), bisect_right(times, window.stop) - 1
        if last <= first:
            continue
        in_rounds_bytes += counts[last] - counts[first]
        in_rounds_s += times[last] - times[first]
        least = MOVING_SHARE * bytes_per_s
        moving = [
            at
            for at in range(first, last)
            if counts[at + 1] - counts[at] >= least * (times[at + 1] - times[at]) and counts[at + 1] > counts[at]
        ]
        if moving:
            moved_bytes += counts[moving[-1] + 1] - counts[moving[0]]
            moved_s += times[moving[-1] + 1] - times[moving[0]]
    if not moved_s:
        raise ValueError(f"no bytes moved in {len(windows)} rounds")
    start, stop = bisect_left(times, windows[0].start), bisect_right(times, windows[-1].stop) - 1
    return UplinkShare(
        moving=moved_bytes / (bytes_per_s * moved_s),
        rounds=in_rounds_bytes / (bytes_per_s * in_rounds_s),
        run=(counts[stop] - counts[start]) / (bytes_per_s * (times[stop] - times[start])),
        moving_s=moved_s / len(windows),
    )
