"""This is where the banned are shut out: no call from them is answered, and none is made to them."""

from swarm.core.errors import RemoteError, UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Handler, Message, Transport


class GuardedTransport:
    """A transport without its outcasts. To everyone above it they are as good as dead."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._outcasts: set[PeerId] = set()

    def shut_out(self, peer_id: PeerId) -> None:
        """From now on. Calls that are open already end as they would."""
        self._outcasts.add(peer_id)

    def let_in(self, peer_id: PeerId) -> None:
        self._outcasts.discard(peer_id)

    @property
    def peer_id(self) -> PeerId:
        return self._inner.peer_id

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def guarded(sender: PeerId, request: Message) -> Message:
            if sender in self._outcasts:
                raise RemoteError("banned", f"{sender} is banned from this run", sender)
            return await handler(sender, request)

        self._inner.serve(method, guarded, max_body_bytes=max_body_bytes)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if peer_id in self._outcasts:
            raise UnreachableError(f"{peer_id} is banned from this run")
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        if peer_id in self._outcasts:
            raise UnreachableError(f"{peer_id} is banned from this run")
        await self._inner.connect(peer_id, addresses)

    def addresses(self) -> list[str]:
        return self._inner.addresses()

    def traffic(self) -> tuple[int, int]:
        return self._inner.traffic()

    async def close(self) -> None:
        await self._inner.close()
