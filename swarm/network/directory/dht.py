"""How peers find each other: the directory over hivemind's DHT, in the caller's event loop.

Every node checks every record before it stores it or passes it on (`records`), so nobody can overwrite or outlive
another peer's record. What is stored is bounded in topics, records and bytes.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import TimedStorage

from swarm.core.canonical import Value, unpack
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.directory import persistent
from swarm.network.directory.passed_on import PassedOn
from swarm.network.directory.protocol import BoundedProtocol
from swarm.network.directory.records import CLOCK_SKEW_S, MAX_RECORD_BYTES, Record, open_record, sign_record
from swarm.network.directory.search import SearchingNode
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.p2pd.p2p import P2PTransport

logger = logging.getLogger(__name__)

MAX_TOPICS = 10_000
"""Topics one node stores; past it those that expire first are dropped."""
MAX_TOPICS_OF_A_PEER = 32
"""Under which a node stores its records: one key with records that expire last would else push out all others'."""
MAX_RECORDS_PER_TOPIC = 256
"""Peers one node stores under a topic; callers shard larger crowds over several topics."""

_REQUEST_S = 3.0
"""One question to one node."""
_OPERATION_S = 10.0
"""A whole publish, lookup or join."""
_CLOSE_S = 0.5
_NUM_ASKED = 10
"""Nodes asked in a lookup: twice the five that store a record, for some of them may be new or lying."""


class DHTDirectory:
    """`swarm.network.transport.Directory` over one DHT node. Made by `create`."""

    def __init__(
        self, identity: Identity, transport: P2PTransport, p2p: P2P, node: DHTNode, checks: "_SignedRecords"
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._p2p = p2p
        self._node = node
        self._checks = checks
        self._found_wrong = 0
        self._passed_on = PassedOn(transport)
        self._passed_on.serve()
        self._is_closing = False
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def create(cls, identity: Identity, transport: P2PTransport, *, serves: bool = True) -> "DHTDirectory":
        """A DHT of one node, until `join` succeeds. `serves` = False: ask others only (behind a NAT, say).

        Raises LocalError when p2pd does not answer.
        """
        # hivemind's wrapper of a p2pd that somebody else runs; its sockets go to the runtime folder.
        wrapper: type[P2P] = type(
            "RuntimeFolderP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{transport.daemon.folder}/"}
        )
        checks = _SignedRecords()
        try:
            async with asyncio.timeout(_OPERATION_S):
                p2p = await wrapper.replicate(Multiaddr(f"/unix{transport.daemon.control_path}"))
                reading = persistent.mend(p2p)
                node = await SearchingNode.create(
                    p2p=p2p,
                    client_mode=not serves,
                    record_validator=checks,
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
        assert isinstance(node.protocol, BoundedProtocol)
        node.protocol.storage = _BoundedStorage()
        directory = cls(identity, transport, p2p, node, checks)
        reading.add_done_callback(directory._on_deaf)
        return directory

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
        self._check_alive()
        record, data = sign_record(self._identity, topic, fields, ttl_s=ttl_s, now=swarm_time.now())
        try:
            async with asyncio.timeout(_OPERATION_S):
                stored = await self._node.store(topic, data, record.expires, subkey=record.peer_id)
        except TimeoutError as error:
            raise TransientError(f"{topic}: not published within {_OPERATION_S:g} s") from error
        if not stored:
            raise TransientError(f"{topic}: no node of the DHT took the record")
        self._passed_on.state(topic, data)

    async def lookup(self, topic: str) -> dict[PeerId, dict[str, Value]]:
        return {peer_id: record.fields for peer_id, (record, _) in (await self._newest(topic)).items()}

    async def records(self, topic: str) -> dict[PeerId, bytes]:
        return {peer_id: data for peer_id, (_, data) in (await self._newest(topic)).items()}

    async def plant(self, topic: str, data: bytes, *, peer_id: PeerId, expires: float) -> None:
        self._check_alive()
        key, value, protocol = DHTID.generate(source=topic), DHTProtocol.serializer.dumps(data), self._node.protocol
        protocol.storage.store_subkey(key, peer_id, value, expires)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_S):
                nearest = await self._node.find_nearest_nodes([key], k_nearest=_NUM_ASKED, exclude_self=True)
                others = nearest[key].values()
                store = protocol.call_store
                await asyncio.gather(*(store(one, [key], [value], expires, subkeys=[peer_id]) for one in others))

    @property
    def refused(self) -> int:
        return self._checks.refused + self._found_wrong

    async def _newest(self, topic: str) -> dict[PeerId, tuple[Record, bytes]]:
        self._check_alive()
        try:
            async with asyncio.timeout(_OPERATION_S):
                stored, told = self._stored_under(DHTID.generate(source=topic)), self._passed_on.ask(topic)
                answers, passed_on = await asyncio.gather(stored, told)
        except TimeoutError as error:
            raise TransientError(f"{topic}: not looked up within {_OPERATION_S:g} s") from error
        unwrapped = []
        for data in answers:
            with contextlib.suppress(RemoteError):
                unwrapped.append(_unwrap(data))
        found, refused = self._passed_on.hear(topic, [*unwrapped, *passed_on])
        self._found_wrong += refused + len(answers) - len(unwrapped)
        return found

    async def _stored_under(self, key: DHTID) -> list[bytes]:
        """What this node and the nodes nearest to `key` hold there, duplicates and all.

        hivemind's own `get` merges what strangers answer before it checks the form of all of it, and stops at the first
        dictionary that claims to be the newest; here one honest holder is enough.
        """
        own = self._node.protocol.storage.get(key)
        dictionaries = [own.value] if own is not None else []
        dictionaries += await self._node.held_under(key, _NUM_ASKED)
        values = []
        for dictionary in dictionaries:
            if isinstance(dictionary, DictionaryDHTValue):
                # Not items(): that compares with bounds of the stranger's own, of whatever type.
                values += [item.value for item in itertools.islice(dictionary.data.values(), MAX_RECORDS_PER_TOPIC)]
        return values

    async def close(self) -> None:
        self._is_closing = True
        if not self._transport.ended.is_set():
            with contextlib.suppress(Exception):  # p2pd may go meanwhile, and with it whom to say goodbye to
                async with asyncio.timeout(_CLOSE_S):
                    await self._node.shutdown()
        await self._p2p.shutdown()
        if self._ending is not None:
            await self._ending

    def _on_deaf(self, reading: "asyncio.Task[None]") -> None:
        """A node that hears nothing is as good as one whose p2pd has ended: its owner stops or makes another."""
        if self._is_closing or self._transport.ended.is_set():
            return
        why = None if reading.cancelled() else reading.exception()
        logger.error("nothing is heard of p2pd any more, which is ended: %r", why)
        self._ending = asyncio.ensure_future(self._transport.daemon.stop())

    def _check_alive(self) -> None:
        if self._transport.ended.is_set():
            raise TransientError("p2pd has ended, and the directory with it")

    async def _join_one(self, address: str) -> None:
        peer_id = address.rpartition("/p2p/")[2]
        await self._transport.connect(PeerId(peer_id), [address])
        if await self._node.protocol.call_ping(PeerID.from_base58(peer_id)) is None:
            raise TransientError("connected, but no DHT node answers there")
        self._passed_on.met(PeerId(peer_id))


class _SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Refuses what `open_record` refuses, and records stored under another topic, peer or expiry than they name."""

    def __init__(self) -> None:
        self.refused = 0

    def validate(self, record: DHTRecord) -> bool:
        is_true = self._is_true(record)
        self.refused += not is_true
        return is_true

    def _is_true(self, record: DHTRecord) -> bool:
        try:
            # A dictionary is refused whole for one bad entry: an entry that expired on its way must not be one.
            signed = open_record(_unwrap(record.value), now=swarm_time.now(), slack_s=CLOCK_SKEW_S)
        except RemoteError as error:
            logger.debug("directory record refused: %s", error)
            return False
        return bool(
            record.key == DHTID.generate(source=signed.topic).to_bytes()
            and record.subkey == DHTProtocol.serializer.dumps(signed.peer_id)
            and record.expiration_time == signed.expires
        )


def _unwrap(value: object) -> bytes:
    """A record's bytes without the MessagePack wrapping the DHT puts around values."""
    data = unpack(value, max_bytes=MAX_RECORD_BYTES + 8) if isinstance(value, bytes) else None
    if not isinstance(data, bytes):
        raise RemoteError("malformed", "a directory value that is not bytes")
    return data


class _BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage with a bound on topics, on peers in each, and on topics of each."""

    def __init__(self) -> None:
        super().__init__(maxsize=MAX_TOPICS)
        self._topics_of = TimedStorage()
        """By subkey, topics that it is stored under, or was, until the last of them has expired."""

    def store_subkey(self, key: DHTID, subkey: object, value: bytes, expiration_time: float) -> bool:
        present = self.get(key)
        topic = present.value if present is not None and isinstance(present.value, DictionaryDHTValue) else {}
        if subkey not in topic and (
            len(topic) >= MAX_RECORDS_PER_TOPIC or self._num_topics_of(subkey) >= MAX_TOPICS_OF_A_PEER
        ):
            return False
        is_stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        if is_stored:
            known = self._topics_of.get(subkey)
            topics = known.value if known is not None else set()
            topics.add(key)
            if known is None or known.expiration_time < expiration_time:
                self._topics_of.store(subkey, topics, expiration_time)
        return is_stored

    def _num_topics_of(self, subkey: object) -> int:
        known = self._topics_of.get(subkey)
        if known is None:
            return 0
        known.value.intersection_update([topic for topic in known.value if self._is_under(topic, subkey)])
        return len(known.value)

    def _is_under(self, topic: DHTID, subkey: object) -> bool:
        held = self.get(topic)
        return held is not None and isinstance(held.value, DictionaryDHTValue) and subkey in held.value
