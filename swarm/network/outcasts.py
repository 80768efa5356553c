"""A transport on which the banned are shut out, and newcomers kept at a distance: whose calls pass, and which."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Handler, Message, Transport, TransportAround


@dataclass(eq=False)
class _OpenCall:
    task: asyncio.Task[object]
    method: str
    is_broken: bool = False

    def break_off(self) -> None:
        """Once: a task that is cancelled more often than the call takes back would end with it."""
        if not self.is_broken:
            self.is_broken = True
            self.task.cancel()


def _always(peer: PeerId, method: str) -> bool:
    return True


class GuardedTransport(TransportAround):
    """A transport without its outcasts: no call from them is answered, and none is made to them.

    To everyone above it they are as good as dead; newcomers are, to all methods but those that are for them.
    """

    def __init__(self, inner: Transport, may: Callable[[PeerId, str], bool] = _always) -> None:
        """`may`: whether calls of a method pass between this peer and another, which is no outcast."""
        super().__init__(inner)
        self._may = may
        self._outcasts: dict[PeerId, frozenset[str]] = {}
        """With the methods that pass all the same."""
        self._calling: defaultdict[PeerId, set[_OpenCall]] = defaultdict(set)
        """By whom they are made to."""

    def shut_out(self, peer_id: PeerId, *, but: frozenset[str] = frozenset()) -> None:
        """From now on, but for calls of these methods; others that are open to the peer break off as if it had died.

        What it has asked already is still answered.
        """
        self._outcasts[peer_id] = but
        for call in self._calling.get(peer_id, ()):
            if call.method not in but:
                call.break_off()

    def let_in(self, peer_id: PeerId) -> None:
        self._outcasts.pop(peer_id, None)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def guarded(sender: PeerId, request: Message) -> Message:
            if method not in self._outcasts.get(sender, {method}):
                raise RemoteError("banned", f"{sender} is banned from this run", sender)
            if not self._may(sender, method):
                raise TransientError(f"{method}: {sender} is not known here to be past its probation")
            return await handler(sender, request)

        self._inner.serve(method, guarded, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method not in self._outcasts.get(peer_id, {method}):
            raise UnreachableError(f"{peer_id} is banned from this run")
        if not self._may(peer_id, method):
            raise UnreachableError(f"{method}: {peer_id} is not known here to be past its probation")
        task = asyncio.current_task()
        assert task is not None
        cancelling, opened = task.cancelling(), _OpenCall(task, method)
        self._calling[peer_id].add(opened)
        try:
            return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
        except asyncio.CancelledError:
            if opened.is_broken and task.uncancel() <= cancelling:
                raise UnreachableError(f"{peer_id} has been banned from this run") from None
            raise
        finally:
            self._calling[peer_id].discard(opened)
            if not self._calling[peer_id]:
                del self._calling[peer_id]

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        if peer_id in self._outcasts:
            raise UnreachableError(f"{peer_id} is banned from this run")
        await self._inner.connect(peer_id, addresses)
