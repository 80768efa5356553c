"""This is where peers find each other: the directory over hivemind's DHT, in the same event loop and over the same p2pd.

Every node checks every record before it stores it or passes it on (`records`), so nobody can overwrite or outlive
another peer's record. What is stored is bounded in topics, records and bytes.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.identity import Identity
from swarm.network.p2p import P2PTransport
from swarm.network.records import CLOCK_SKEW_S, MAX_RECORD_BYTES, open_record, sign_record

logger = logging.getLogger(__name__)

MAX_TOPICS = 10_000
"""Topics one node stores; past it those that expire first are dropped."""
MAX_RECORDS_PER_TOPIC = 256
"""Peers one node stores under a topic; callers shard larger crowds over several topics."""

_REQUEST_S = 3.0
"""One question to one node."""
_OPERATION_S = 10.0
"""A whole publish, lookup or join."""
_CLOSE_S = 0.5


class DHTDirectory:
    """`swarm.network.transport.Directory` over one DHT node. Made by `create`."""

    def __init__(self, identity: Identity, transport: P2PTransport, p2p: P2P, node: DHTNode) -> None:
        self._identity = identity
        self._transport = transport
        self._p2p = p2p
        self._node = node

    @classmethod
    async def create(cls, identity: Identity, transport: P2PTransport, *, serves: bool = True) -> "DHTDirectory":
        """A DHT of one node, until `join` succeeds. `serves` = False: ask others only (behind a NAT, say).

        Raises LocalError when p2pd does not answer.
        """
        # hivemind's wrapper of a p2pd that somebody else runs; its sockets go to the runtime folder.
        wrapper = type("RuntimeFolderP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{transport.daemon.folder}/"})
        try:
            async with asyncio.timeout(_OPERATION_S):
                p2p = await wrapper.replicate(Multiaddr(f"/unix{transport.daemon.control_path}"))
                node = await DHTNode.create(
                    p2p=p2p,
                    client_mode=not serves,
                    record_validator=_SignedRecords(),
                    wait_timeout=_REQUEST_S,
                    # Each lookup asks the nodes that hold the topic: leases are short, caches would only age them.
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_size=1,
                    reuse_get_requests=False,
                )
        except Exception as error:
            raise LocalError(f"the DHT did not start: {error}") from error
        node.protocol.storage = _BoundedStorage()
        return cls(identity, transport, p2p, node)

    async def join(self, addresses: Sequence[str]) -> int:
        """Connect to seeds (multiaddresses with /p2p/<peer id>) and merge with their DHT; returns how many answered.

        Raises TransientError when none did, with what went wrong at each. Calling it again is harmless.
        """
        results = await asyncio.gather(*(self._join_one(address) for address in addresses), return_exceptions=True)
        failures = [f"{address}: {r}" for address, r in zip(addresses, results, strict=True) if r is not None]
        for result in results:
            if result is not None and not isinstance(result, TransientError):
                raise result
        if len(failures) == len(addresses):
            raise TransientError("no seed answered. " + "; ".join(failures))
        for failure in failures:
            logger.info("seed not reached: %s", failure)
        with contextlib.suppress(TimeoutError):  # it has answered: that neighbours are slow is no failure
            async with asyncio.timeout(_OPERATION_S):
                await self._node.find_nearest_nodes([self._node.node_id])
        return len(addresses) - len(failures)

    @property
    def num_neighbours(self) -> int:
        """Nodes in the routing table; 0 means alone."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def publish(self, topic: str, fields: Mapping[str, Value], *, ttl_s: float) -> None:
        record, data = sign_record(self._identity, topic, fields, ttl_s=ttl_s, now=time.time())
        try:
            async with asyncio.timeout(_OPERATION_S):
                stored = await self._node.store(topic, data, record.expires, subkey=record.peer_id)
        except TimeoutError as error:
            raise TransientError(f"{topic}: not published within {_OPERATION_S:g} s") from error
        if not stored:
            raise TransientError(f"{topic}: no node of the DHT took the record")

    async def lookup(self, topic: str) -> dict[PeerId, dict[str, Value]]:
        try:
            async with asyncio.timeout(_OPERATION_S):
                found = await self._node.get(topic, latest=True)
        except TimeoutError as error:
            raise TransientError(f"{topic}: not looked up within {_OPERATION_S:g} s") from error
        records: dict[PeerId, dict[str, Value]] = {}
        if found is None or not isinstance(found.value, dict):
            return records
        for _, item in sorted(found.value.items(), key=lambda entry: str(entry[0])):
            with contextlib.suppress(RemoteError):
                record = open_record(item.value, now=time.time())
                if record.topic == topic:
                    records[record.peer_id] = record.fields
        return records

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # p2pd may be gone already, and with it whom to say goodbye to
            async with asyncio.timeout(_CLOSE_S):
                await self._node.shutdown()
        await self._p2p.shutdown()

    async def _join_one(self, address: str) -> None:
        peer_id = address.rpartition("/p2p/")[2]
        await self._transport.connect(PeerId(peer_id), [address])
        if await self._node.protocol.call_ping(PeerID.from_base58(peer_id)) is None:
            raise TransientError("connected, but no DHT node answers there")


class _SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Refuses what `records.open_record` refuses, and a record stored under another topic, peer or expiry than it names."""

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_RECORD_BYTES + 8:
            return False
        try:
            data = DHTProtocol.serializer.loads(record.value)
            if not isinstance(data, bytes):
                return False
            # A dictionary is refused whole for one bad entry: an entry that expired on its way must not be one.
            signed = open_record(data, now=time.time(), slack_s=CLOCK_SKEW_S)
        except Exception as error:
            logger.debug("directory record refused: %s", error)
            return False
        return bool(
            record.key == DHTID.generate(source=signed.topic).to_bytes()
            and record.subkey == DHTProtocol.serializer.dumps(signed.peer_id)
            and record.expiration_time == signed.expires
        )


class _BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage with a bound on topics and on peers in each."""

    def __init__(self) -> None:
        super().__init__(maxsize=MAX_TOPICS)

    def store_subkey(self, key: DHTID, subkey: object, value: bytes, expiration_time: float) -> bool:
        present = self.get(key)
        if present is not None and isinstance(present.value, DictionaryDHTValue):
            topic = present.value
            if len(topic) >= MAX_RECORDS_PER_TOPIC and subkey not in topic:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))
