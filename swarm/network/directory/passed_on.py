"""Directory records passed on from peer to peer: what the DHT may be kept from telling.

Whoever has ten nodes beside a topic's key answers for it, and may answer that nobody is there. So each peer tells its
own record to those it knows under the topic and to the seeds that it joined through, and asks them for others'. Records
are signed, so nobody can add or change one by passing it on.
"""

import asyncio
import random
from collections.abc import Iterable

from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.network.directory.records import (
    MAX_RECORD_BYTES,
    MAX_TOPIC_CHARACTERS,
    Record,
    is_live,
    newest_of,
    open_record,
)
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.transport import Message, Transport

TELL = "directory_records"
"""{topic, own: [a record] or []} -> {records}: what the asked holds under the topic, some of it if it is much."""
ASK_EVERY_S = 5.0
"""For a topic, at most: whoever looks at it asks the DHT each time."""
ASKED = 2
"""Of those who are there, and as many seeds."""
CALL_S = 3.0
MAX_TOPICS = 256
MAX_TOPICS_OF_A_PEER = 8
"""Under which its record is kept at its own word: who has one key does not fill the table."""
MAX_RECORDS = 256
"""Of a topic; whoever is told of more forgets some, by chance."""
MAX_TOLD = 64


class PassedOn:
    """The records that this peer has heard, by topic."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._heard: dict[str, dict[PeerId, tuple[Record, bytes]]] = {}
        """What was last looked at, last. Checked when it came, and not again: to ask for it must cost nobody much."""
        self._own: dict[str, bytes] = {}
        self._seeds: set[PeerId] = set()
        self._asked_at: dict[str, float] = {}
        self._rng = random.Random()

    def serve(self) -> None:
        """Begin to answer."""
        self._transport.serve(TELL, self._on_asked, max_body_bytes=0)

    def met(self, seed: PeerId) -> None:
        """One that this peer joins through: it is asked too."""
        self._seeds.add(seed)

    def state(self, topic: str, data: bytes) -> None:
        """This peer's own record."""
        self._own[topic] = data
        keep_newest(self._own, MAX_TOPICS)

    def hear(self, topic: str, answers: Iterable[bytes]) -> tuple[dict[PeerId, tuple[Record, bytes]], int]:
        """Records under the topic that came, each checked: all that are known now and live, and how many of those that
        came were refused."""
        now, heard = swarm_time.now(), self._heard.pop(topic, {})
        came, refused = newest_of(answers, topic, now=now)
        live = {peer: one for peer, one in heard.items() if is_live(one[0], now=now)}
        newer = {peer: one for peer, one in came.items() if peer not in live or live[peer][0].expires < one[0].expires}
        known = dict(sorted((live | newer).items()))
        peers = list(known)
        kept = peers if len(peers) <= MAX_RECORDS else self._rng.sample(peers, MAX_RECORDS)
        if kept:
            self._heard[topic] = {peer: known[peer] for peer in kept}
        if len(self._heard) > MAX_TOPICS:
            # First what this peer has never asked about, and of it what the fewest say they serve.
            lost = min(self._heard, key=lambda one: (one in self._asked_at, len(self._heard[one])))
            del self._heard[lost]
        return known, refused

    async def ask(self, topic: str) -> list[bytes]:
        """What some others hold under the topic, unchecked; nothing if they were asked a moment ago."""
        now = asyncio.get_running_loop().time()
        if now < self._asked_at.get(topic, -ASK_EVERY_S) + ASK_EVERY_S:
            return []
        self._asked_at.pop(topic, None)
        self._asked_at[topic] = now
        keep_newest(self._asked_at, MAX_TOPICS)
        there = sorted(self._heard.get(topic, {}).keys() - {self._transport.peer_id})
        seeds = sorted(self._seeds - {self._transport.peer_id})
        asked = {*self._some(there), *self._some(seeds)}
        answers = await asyncio.gather(*(self._ask_one(peer, topic) for peer in sorted(asked)))
        return [data for answer in answers for data in answer]

    def _some(self, peers: list[PeerId]) -> list[PeerId]:
        return self._rng.sample(peers, min(ASKED, len(peers)))

    async def _ask_one(self, peer: PeerId, topic: str) -> tuple[bytes, ...]:
        own = [self._own[topic]] if topic in self._own else []
        try:
            reply = await self._transport.call(
                peer, TELL, Message({"topic": topic, "own": [*own]}), timeout_s=CALL_S, max_body_bytes=0
            )
            fields = Fields("passed on records", reply.meta)
            records = fields.items("records", _record_item, max_items=MAX_TOLD)
            fields.done()
        except (TransientError, RemoteError):
            return ()
        return records

    async def _on_asked(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("request for records", request.meta)
        topic = fields.text("topic", max_length=MAX_TOPIC_CHARACTERS)
        own = fields.items("own", _record_item, max_items=1)
        fields.done()
        for data in own:
            if open_record(data, now=swarm_time.now()).peer_id != sender:  # others' records are for others to tell
                raise RemoteError("standing", "a record of another peer's", sender)
        if own and topic not in self._asked_at and self._num_topics_of(sender, but=topic) >= MAX_TOPICS_OF_A_PEER:
            raise RemoteError("too_many", f"records under more than {MAX_TOPICS_OF_A_PEER} topics", sender)
        known = [data for _, data in self.hear(topic, own)[0].values()]
        told = known if len(known) <= MAX_TOLD else self._rng.sample(known, MAX_TOLD)
        return Message({"records": [*told]})

    def _num_topics_of(self, peer: PeerId, *, but: str) -> int:
        return sum(peer in heard for topic, heard in self._heard.items() if topic != but)


def _record_item(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_RECORD_BYTES:
        raise RemoteError("malformed", "a directory record that is not bytes, or too long")
    return value
