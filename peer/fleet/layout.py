"""The memory of simulated microbatches: what is read together lies together.

There are millions of reads of what nobody has read lately, so lines of the cache count, not bytes.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cache_hints import zeros_on_lines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHOWN = np.dtype(
    [
        ("stage", np.int32),  # -1: serves none
        ("takes_from", np.int32),  # it takes new work of this step on; NO_STEP while it drains
        ("backlog_s", np.float64),  # of compute: queue and current
        ("sends_at", np.float64),  # when the uplink is free
        ("paced_at", np.float64),  # when it would take the next, were all it took computed, and sent on, whole at once
    ]
)
PEER = np.dtype(
    [  # what is read when a microbatch comes is on the first line
        ("forward_s", np.float64),
        ("backward_s", np.float64),
        ("send_s", np.float64),  # of one activation through its uplink
        ("begins_at", np.float64),  # of `current`
        ("current", np.int32),  # what it computes, or will as soon as that arrives; NOTHING, LOST, AUDIT
        ("queue", np.int32),  # first of what is on its way to it or waits for it, in its order; -1: none
        ("last", np.int32),  # of the queue
        ("last_step", np.int32),  # of that one
        ("last_arrives_at", np.float64),
        ("window", np.int32),  # microbatches a source keeps in flight
        ("in_flight", np.int32),  # of a source
        ("again_s", np.float64),  # of compute to do for a lost replica before anything else
        ("owes_s", np.float64),  # of audits
        ("audited_s", np.float64),
    ]
)
KNOWN = np.dtype(
    [
        ("target", np.int32),
        ("duration_s", np.float32),  # smoothed; UNTRIED, or UNANSWERED so far
    ]
)
WORK = np.dtype(
    [
        ("at", np.int32),  # stage it is at, or on the way to
        ("is_back", np.int32),
        ("step", np.int32),
        ("counted", np.int32),  # the first stage that has it in its sum: all above have too
        ("is_active", np.int32),
        ("is_queued", np.int32),
        ("left_at", np.float64),  # when the last sender had sent all of it
        ("born", np.float64),
        ("arrives_at", np.float64),
        ("next", np.int32),  # in the queue of the peer that it has arrived at, or will: older steps first, then
        ("before", np.int32),  # what arrives first
    ]
)
WAY = np.dtype(
    [
        ("holder", np.int32),  # the stage's peer that has it
        ("link", np.int32),  # place, among those it knows, of the one it chose next; -1: none, or it has answered
        ("chosen_at", np.float32),
    ]
)
EVENT = np.dtype([("at", np.float64), ("next", np.int32), ("is_set", np.int32)])


class Flow(NamedTuple):
    """P peers, each knowing F of the next stage; S stages; room for M microbatches in flight."""

    shown: Any
    """SHOWN [P]: what callers look at. A choice reads it of many peers, so it is short, and none lies on two lines of
    the cache."""
    peers: Any
    """PEER [P]: the rest."""
    done: Ints
    """[P, 2] unaveraged microbatches, of even and odd steps."""
    known: Any
    """KNOWN [P, F]: what a peer knows of the next stage."""
    work: Any
    """WORK [M]: microbatches."""
    ways: Any
    """WAY [M, S]: whose the microbatch is in each stage, and how that peer chose the next."""
    holder: NDArray[np.int32]
    """[S, M]: the same holders by stage, for a lost peer's are searched."""
    free: NDArray[np.int32]
    """[M] places in `work`."""
    events: Any
    """EVENT [P + M]: a peer's, or of a microbatch that waits for a stage without peers."""
    moments: NDArray[np.int32]
    """[NUM_MOMENTS] the first event of each."""
    members: NDArray[np.int32]
    """[S, P]"""
    stages: Ints
    """[S, 7]: places below."""
    counters: Ints
    trips_s: Floats
    """The last ones' durations."""
    settings: Floats
    """Seconds from peer to peer; that asking takes; seconds of audits that a second of other work makes due; seconds of
    them that are due at most; whether everyone knows all of the next stage."""


def on_lines(num: int, record: "np.dtype[Any]") -> Any:
    """Zeros from where a line of the cache begins, each as many bytes as a power of two: none lies on more lines than
    it must."""
    assert record.names is not None
    assert record.fields is not None
    stride = 1 << (record.itemsize - 1).bit_length()
    padded = np.dtype(
        {
            "names": record.names,
            "formats": [record.fields[name][0] for name in record.names],
            "offsets": [record.fields[name][1] for name in record.names],
            "itemsize": stride,
        }
    )
    return zeros_on_lines(num * stride, np.uint8).view(padded)
