"""A peer's lies in the directory: in others' names, with others' old words, of itself, as a crowd.

What it plants lies in its own node whatever others check, as with anybody who has changed the program.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from peer.adversary import strengths
from peer.adversary.hooks import Adversary, Place
from swarm.attacks import Attack
from swarm.core.canonical import Value, digest, pack, unpack
from swarm.core.ids import PeerId, Step
from swarm.core.round.averaging_round import Instruction, RoundFacts, SendBallot
from swarm.core.round.ballots import Proposal
from swarm.identity.key import Identity
from swarm.network.directory.records import MAX_RECORD_BYTES, sign_record


class ForgedRecords(Adversary):
    """Under the name of each peer of its own stage and of those beside it stands a record without addresses."""

    async def meddle(self, place: Place) -> None:
        fields: dict[str, Value] = {"addresses": [], "version": 0}
        for topic in place.topics:
            for victim in await place.directory.lookup(topic):
                if victim != place.me.peer_id:
                    record, data = sign_record(place.me, topic, fields, ttl_s=place.ttl_s, now=time.time())
                    value = unpack(data, max_bytes=MAX_RECORD_BYTES)
                    assert isinstance(value, dict)
                    forged = pack({**value, "peer_id": victim})
                    await place.directory.plant(topic, forged, peer_id=victim, expires=record.expires)


class ReplayedRecords(Adversary):
    """The first record it has seen of each peer is stored again and again, also as of another stage."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._seen: dict[tuple[str, PeerId], bytes] = {}

    async def meddle(self, place: Place) -> None:
        for topic in place.topics:
            for peer, data in (await place.directory.records(topic)).items():
                if len(self._seen) < strengths.REPLAYED_RECORDS and peer != place.me.peer_id:
                    self._seen.setdefault((topic, peer), data)
        for (_, peer), data in sorted(self._seen.items()):
            for topic in place.topics:
                await place.directory.plant(topic, data, peer_id=peer, expires=time.time() + place.ttl_s)


class InflatedRecords(Adversary):
    """It says of itself that it is far ahead, and has nothing waiting."""

    def says(self, step: Step, fields: Mapping[str, Value]) -> dict[str, Value]:
        if not self.acts_in(step):
            return dict(fields)
        return {**fields, "version": int(step) + strengths.INFLATED_VERSIONS}

    def says_waits_s(self, step: Step, waits_s: float) -> float:
        return 0.0 if self.acts_in(step) else waits_s


class SybilFlood(Adversary):
    """Made up identities with genuine keys: in the directory, among those it says want to join, and on its rosters."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        names = [digest("sybil", [seed, number]) for number in range(strengths.SYBILS)]
        self.identities = [Identity.from_seed(name) for name in names]

    async def meddle(self, place: Place) -> None:
        fields: dict[str, Value] = {"addresses": [*place.addresses], "version": 0}
        place.joining.update(sybil.peer_id for sybil in self.identities)
        for topic in place.topics:
            for sybil in self.identities:
                record, data = sign_record(sybil, topic, fields, ttl_s=place.ttl_s, now=time.time())
                await place.directory.plant(topic, data, peer_id=sybil.peer_id, expires=record.expires)

    def instructed(self, facts: RoundFacts, instruction: Instruction, me: Identity) -> tuple[Instruction, ...]:
        if not isinstance(instruction, SendBallot) or not self.acts_in(facts.step):
            return (instruction,)
        asked, roster = instruction.proposal, instruction.proposal.new_roster
        if roster is None:
            return (instruction,)
        crowd = sorted({*roster.joins, *(sybil.peer_id for sybil in self.identities)})
        flooded = replace(roster, joins=tuple(crowd))
        flooded = replace(flooded, signature=me.sign(flooded.signed_bytes()))
        return (replace(instruction, proposal=Proposal.of_roster(flooded, asked.proof)),)
