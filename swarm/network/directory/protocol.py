"""hivemind's DHT protocol, of which a stranger's message costs a bounded time: one key asked for, or one record stored.

Peers of ours ask and store no more at once (`search`, `dht`). hivemind's own takes thousands, in one go of the event
loop, and answers with more than its connection to p2pd carries.
"""

import asyncio

import hivemind.dht.node
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2


class BoundedProtocol(DHTProtocol):  # type: ignore[misc]
    """What it refuses it raises ValueError for: hivemind tells the caller."""

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        """On the wire it is hivemind's."""
        name: str = DHTProtocol._get_handle_name(namespace, method_name)
        return name

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        _check_node(request.peer)
        return await super().rpc_ping(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        _check_node(request.peer)
        _check_one(request.keys)
        return await super().rpc_find(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """In the cache, whose dictionaries have no bound and hide what is stored, nobody of ours has anything kept."""
        _check_node(request.peer)
        _check_one(request.keys)
        if not all(
            len(of_each) == 1
            for of_each in (request.subkeys, request.values, request.expiration_time, request.in_cache)
        ):
            raise ValueError("a record without its parts, or with several of one")
        if request.in_cache[0] or request.subkeys[0] == self.IS_DICTIONARY:
            raise ValueError("a record is stored by itself, and not in the cache")
        return await super().rpc_store(request, context)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """As hivemind's, but for two things: a peer has one id, and a new node is handed no records.

        To see which it should have takes a walk over all topics, for each id that a stranger makes up; records live
        for minutes, are renewed, and are looked up at more nodes than store them.
        """
        table = self.routing_table
        former = table.get(peer_id=peer_id)
        node_id = node_id if node_id is not None else former
        if not responded:
            if node_id is not None and node_id in table:
                del table[node_id]
            return
        if former is not None and former != node_id:
            del table[former]
        asked = table.add_or_update_node(node_id, peer_id)
        if asked is not None:  # the oldest of a full bucket: it stays if it answers
            asyncio.create_task(self.call_ping(asked[1]))


def _check_node(node: "dht_pb2.NodeInfo") -> None:
    """Who has no id is a client alone."""
    if len(node.node_id) not in (0, DHTID.HASH_NBYTES):
        raise ValueError(f"a node's id of {len(node.node_id)} bytes")


def _check_one(keys: "list[bytes]") -> None:
    if len(keys) != 1 or len(keys[0]) != DHTID.HASH_NBYTES:
        raise ValueError(f"{len(keys)} keys at once, of {sum(map(len, keys))} bytes: it is one of {DHTID.HASH_NBYTES}")


hivemind.dht.node.DHTProtocol = BoundedProtocol
