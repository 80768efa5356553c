"""When a peer of a benchmark works on a round's bytes, noted by itself: computing on them, or moving them.

Spans of the exact thread's jobs (encode, hash, check, reduce, decode) and of bodies on their way out or in. What they
leave of a round is what the round waits for: votes, turns of other peers, the event loop. Of the jobs, what is
encoding, hashing or decoding (a reducer's decoding and adding too) is noted once more, each for itself.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, get_args

BULK_BYTES = 8 << 10
"""The shortest fragment of a part; shorter bodies are votes and the like."""

Span = tuple[str, float, float]
_spans: list[Span] = []
_lock = threading.Lock()
_inside = threading.local()
METHODS = {
    "encode": "encode",
    "encode_parts": "encode",
    "encode_sum": "decode",
    "decode": "decode",
    "sum_of_squares": "decode",
}
"""Which piece of a round a codec's method is; a reducer's decoding, adding and encoding in one pass is a decoder's."""
PIECES = ("encode", "hash", "wire", "decode")


def install() -> None:
    """Note what is sent and received. Before `swarm.network.p2pd.p2p` is imported, which takes some by name."""
    from swarm import bulk_digest
    from swarm.averaging import encoded_mean
    from swarm.averaging.codecs import vector_codec
    from swarm.core.settings import AveragingCodecName
    from swarm.network.bulk import framing, sockets

    for codec in {type(vector_codec(name)) for name in get_args(AveragingCodecName)}:
        for method, piece in METHODS.items():
            if hasattr(codec, method):
                setattr(codec, method, noting(piece, getattr(codec, method)))
    bulk_digest.bulk_digest = noting("hash", bulk_digest.bulk_digest)
    encoded_mean.mean_of_encoded = noting("decode", encoded_mean.mean_of_encoded)

    class NotedSending(sockets.Sending):
        def __init__(self, connection: Any, *buffers: Any, **options: Any) -> None:
            self._began = time.monotonic() if sum(map(len, buffers)) >= BULK_BYTES else None
            super().__init__(connection, *buffers, **options)

        def _send_available(self) -> bool:
            ended = super()._send_available()
            if ended and self._began is not None:
                note("wire", self._began)
                self._began = None
            return ended

    receive_into = framing.receive_into

    async def noted(connection: Any, view: memoryview, **options: Any) -> None:
        began = time.monotonic()
        await receive_into(connection, view, **options)
        if len(view) >= BULK_BYTES:
            note("wire", began)

    sockets.Sending = framing.Sending = NotedSending  # type: ignore[misc]
    framing.receive_into = noted


def computing(job: Callable[[], Any]) -> Callable[[], Any]:
    """The job, noted."""

    @functools.wraps(job)
    def noted() -> Any:
        began = time.monotonic()
        try:
            return job()
        finally:
            note("compute", began)

    return noted


def noting(piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noted unless a noted one calls it."""

    @functools.wraps(function)
    def noted(*arguments: Any, **options: Any) -> Any:
        if getattr(_inside, "a_piece", False):
            return function(*arguments, **options)
        _inside.a_piece, began = True, time.monotonic()
        try:
            return function(*arguments, **options)
        finally:
            _inside.a_piece = False
            note(piece, began)

    return noted


def note(kind: str, began: float) -> None:
    with _lock:
        _spans.append((kind, began, time.monotonic()))


def taken(start: float, stop: float) -> dict[str, float]:
    """Seconds between two times in which there was some of each kind, or of any ("all"), and those of the pieces added
    up ("pieces"); forgets them."""
    with _lock:
        spans = list(_spans)
        _spans.clear()
    kinds = {kind for kind, _, _ in spans}
    found = {kind: covered((span for span in spans if span[0] == kind), start, stop) for kind in sorted(kinds)}
    pieces = sum(found.get(piece, 0.0) for piece in PIECES)
    return found | {"all": covered(spans, start, stop), "pieces": pieces}


def covered(spans: Iterable[Span], start: float, stop: float) -> float:
    """Seconds from `start` to `stop` that are in at least one of the spans."""
    seconds, at = 0.0, start
    for _, began, ended in sorted(spans, key=lambda span: span[1]):
        seconds += max(0.0, min(ended, stop) - max(began, at))
        at = max(at, min(ended, stop))
    return seconds
