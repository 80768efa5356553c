"""Hash chains of made up members and of a host, and what contributions reveal of them."""

import hashlib
from functools import cache

from swarm.core.audit.beacon import Beacon
from swarm.core.audit.chance import REVEALED_AFTER, Chance, HostWord, Link
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.ticket import Ticket
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.record import Signer

LENGTH = 1 << 10
UNSAID = HostWord(0, bytes(32))
NO_CHANCE = Chance(bytes(32), UNSAID, None)
"""For what is not checked."""


@cache
def chain_of(peer: str) -> HashChain:
    """A member's."""
    return HashChain(hashlib.sha256(f"chances/{peer}".encode()).digest(), LENGTH)


HOST_CHAIN = chain_of("the host")


def said_by(host: HashChain, num_versions: int) -> HostWord:
    """The host's word on so many versions."""
    return HostWord(num_versions, host.reveal(num_versions - 1))


def link_of(peer: PeerId, step: int) -> Link:
    """What is certified of a member that contributed to the step last."""
    return Link(Step(step), chain_of(peer).reveal(step - REVEALED_AFTER))


def chance_of(peer: PeerId, step: int, *, said: HostWord | None = None, ticket: Ticket | None = None) -> Chance:
    """What an honest member's contribution reveals; `said`: the host's word, on every version before the step."""
    if said is None:
        said = said_by(HOST_CHAIN, step)
    return Chance(chain_of(peer).reveal(step - REVEALED_AFTER), said, ticket)


def ticket_of(peer: PeerId, run_key: Signer, *, run_id: str, stage: int) -> Ticket:
    return Ticket(run_id, peer, StageIndex(stage), chain_of(peer).end).signed_by(run_key)


def beacon_of(step: int, of: str = "") -> Beacon:
    """Some beacon of the step."""
    return Beacon(Step(step), hashlib.sha256(f"beacon/{step}/{of}".encode()).digest())
