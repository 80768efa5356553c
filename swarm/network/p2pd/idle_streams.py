"""Streams at rest between calls: opening one costs p2pd more than a part of a gradient to carry.

A stream that its other end has closed meanwhile is not handed out. The other end keeps idle streams longer than we do
(`KEPT_BY_CALLEE_S`), so that a call does not meet a stream that is just being closed.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.network.bulk.sockets import Stream, is_quiet

KEPT_S = 20.0
KEPT_BY_CALLEE_S = 60.0
PUNCHED_KEPT_S, PUNCHED_KEPT_BY_CALLEE_S = 600.0, 660.0
"""To make another takes both sides and an onlooker."""
MOST_OF_A_PEER = 16
"""As many as carry a round over a slow line: a new connection would have to learn the line's rate again."""
MOST_OF_ALL = 128
"""Of those that were not punched: another is opened as soon as it is needed."""
MOST_PUNCHED = 512
"""As many as 21 peers are punched by; of more, whoever has the most gives up the one that rests longest."""


@dataclass(frozen=True)
class _Resting:
    stream: Stream
    timer: asyncio.TimerHandle
    is_punched: bool


class IdleStreams:
    """Open streams without a call, by the peer at their other end."""

    def __init__(self) -> None:
        self._streams: dict[PeerId, list[_Resting]] = {}
        self._count = Counter[bool]()
        """Of those that were punched, and of those that were not."""
        self._waiting: dict[PeerId, asyncio.Future[None]] = {}

    def arrival(self, peer_id: PeerId) -> "asyncio.Future[None]":
        """Done when the next stream of the peer is put; for as many as wait."""
        if peer_id not in self._waiting:
            self._waiting[peer_id] = asyncio.get_running_loop().create_future()
        return self._waiting[peer_id]

    def take(self, peer_id: PeerId) -> Stream | None:
        """A stream for the next call; None if one must be opened."""
        while (stream := self._pop(peer_id, -1)) is not None:
            if is_quiet(stream):
                return stream
            stream.close()
        return None

    def put(self, peer_id: PeerId, stream: Stream, *, is_punched: bool = False) -> None:
        """The call on this stream has ended well, to the last byte of its answer. Of a peer as many punched ones are
        kept as whoever punches makes, of others a few."""
        streams = self._streams.setdefault(peer_id, [])
        others = sum(not known.is_punched for known in streams)
        if not is_punched and (others >= MOST_OF_A_PEER or self._count[False] >= MOST_OF_ALL):
            stream.close()
            if not streams:
                del self._streams[peer_id]
            return
        # Put at the end and taken from there: the first is the one that has rested longest.
        timer = asyncio.get_running_loop().call_later(
            PUNCHED_KEPT_S if is_punched else KEPT_S, self._expire, peer_id, stream
        )
        streams.append(_Resting(stream, timer, is_punched))
        self._count[is_punched] += 1
        if self._count[True] > MOST_PUNCHED:
            self._give_up_punched()
        waiting = self._waiting.pop(peer_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def drop(self, peer_id: PeerId) -> None:
        """Close those of one peer: there is a better way to it now."""
        while (stream := self._pop(peer_id, -1)) is not None:
            stream.close()

    def close(self) -> None:
        for peer_id in list(self._streams):
            self.drop(peer_id)

    def _give_up_punched(self) -> None:
        punched = {peer: [known.is_punched for known in streams] for peer, streams in self._streams.items()}
        most = max(punched, key=lambda peer: sum(punched[peer]))
        given_up = self._pop(most, punched[most].index(True))
        assert given_up is not None
        given_up.close()

    def _expire(self, peer_id: PeerId, stream: Stream) -> None:
        held = [known.stream for known in self._streams.get(peer_id, ())]
        if stream in held:
            self._pop(peer_id, held.index(stream))
            stream.close()

    def _pop(self, peer_id: PeerId, index: int) -> Stream | None:
        streams = self._streams.get(peer_id)
        if not streams:
            return None
        popped = streams.pop(index)
        popped.timer.cancel()
        self._count[popped.is_punched] -= 1
        if not streams:
            del self._streams[peer_id]
        return popped.stream
