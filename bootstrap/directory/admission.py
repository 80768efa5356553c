"""Who may take part, and in which stage: the host's decision."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootstrap.audit.justice import Justice
from bootstrap.directory.postings import Postings
from bootstrap.directory.vouchers import refusal, voucher_digest
from bootstrap.owner.progress import PeerFigures, RunProgress
from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.directory.address_rates import AddressRates
from swarm.core.errors import RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId, StageIndex
from swarm.identity.key import is_peer_id

MAX_IDENTITIES = 1 << 16
"""That the books hold. A key costs nothing: of more, those who have done nothing are forgotten, in the order in which
they were last heard of."""
FORGOTTEN_AT_ONCE = 1 << 10
AT_ONCE, PER_S = 256.0, 0.2
"""Admissions from one small network that the ledger keeps, for ever: of newcomers, and of who goes to another stage."""


@dataclass(frozen=True)
class AdmissionPolicy:
    """Whom a host admits."""

    kind: Literal["open", "ticket", "list"] = "open"
    """Everyone, whoever shows a voucher, or those on the list. Who was admitted once is admitted again."""
    listed: frozenset[PeerId] = frozenset()


def listed_peers(path: Path) -> frozenset[PeerId]:
    """The peer ids in a file, one a line; what follows '#' is for people. Raises SettingsError."""
    found = set()
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        name = line.partition("#")[0].strip()
        if name and not is_peer_id(name):
            raise SettingsError(f"--allow {path}: line {number}, {name[:60]!r}, is no peer id (12D3Koo...)")
        found |= {PeerId(name)} if name else set()
    return frozenset(found)


class Admission:
    """Gives tickets."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        num_stages: int,
        ledger: Ledger,
        books: Books,
        progress: RunProgress,
        justice: Justice,
        postings: Postings,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self.policy = policy
        self._num_stages = num_stages
        self._ledger = ledger
        self._books = books
        self._progress = progress
        self._justice = justice
        self._postings = postings
        self._emit = emit
        self._rates = AddressRates(calls_per_s=PER_S, burst=AT_ONCE)

    def admit(self, peer: PeerId, wish: int | None, chain_end: bytes, voucher: str, *, network: str) -> Ticket:
        """The peer's ticket, for the stage it wishes or the one that has fewest. Whoever calls knows who the peer is,
        and from which small `network` it calls.

        In a run of strangers a member has its stage, or the one that it is posted to: nobody goes where he likes.
        Raises RemoteError for a peer that is not admitted, TransientError for one of too many.
        """
        self._books.catch_up(self._ledger)  # verdicts and vouchers are written elsewhere
        held = self._books.peers.get(peer)
        if self._books.is_shut_out(peer):
            raise RemoteError("standing", f"{peer} is shut out of this run", peer)
        shown = None if held is not None else self._check(peer, voucher)
        if wish is None:
            wish = held.stage if held is not None and held.stage is not None else self._fewest()
        if held is not None and held.stage not in (None, wish) and self._justice.is_bound(peer):
            posted = self._postings.target_of(peer)
            wish = wish if wish == posted else held.stage
        if held is None or held.stage not in (None, wish):  # None: it was cut anew, and all come back at once
            self._take_room(network)
        if held is None and len(self._books.peers) >= MAX_IDENTITIES:
            self._forget()
        ticket = self._justice.admit(peer, StageIndex(wish), chain_end)
        now = time.time()
        self._progress.peers[peer] = PeerFigures(wish, now, now)
        if held is None or held.stage != wish:
            facts: dict[str, Value] = {"peer": peer, "stage": wish, "voucher": shown}
            self._ledger.append("admitted", facts)
            self._books.catch_up(self._ledger)
        self._emit({"event": "admitted", "peer_id": peer, "stage": wish})
        return ticket

    def _take_room(self, network: str) -> None:
        """In the ledger. Raises TransientError where the network has had its share."""
        wait_s = self._rates.take(network, now=time.monotonic())
        if wait_s:
            raise TransientError(
                f"more than {AT_ONCE:.0f} peers from your network have been admitted, or have gone to another stage, "
                f"lately; wait {wait_s:.0f} s"
            )

    def _forget(self) -> None:
        """Raises TransientError if all have done something, or are shut out."""
        heard = {peer: figures.last_heard for peer, figures in self._progress.peers.items()}
        idle = [peer for peer in self._books.peers if self._books.is_idle(peer) and not self._justice.was_member(peer)]
        if not idle:
            raise TransientError(f"this run has {MAX_IDENTITIES} identities that it has to remember, and takes no more")
        idle.sort(key=lambda peer: (heard.get(peer, 0.0), self._books.peers[peer].at))
        forgotten = idle[:FORGOTTEN_AT_ONCE]
        self._ledger.append("forgotten", {"peers": [*forgotten]})
        self._books.catch_up(self._ledger)
        for peer in forgotten:
            self._progress.peers.pop(peer, None)
            self._justice.forget(peer)

    def _check(self, peer: PeerId, voucher: str) -> str | None:
        """Name of the voucher that admits the peer; None if it needs none."""
        match self.policy.kind:
            case "open":
                return None
            case "list":
                if peer not in self.policy.listed:
                    raise RemoteError("voucher", f"{peer} is not on this run's list; ask its host to add it", peer)
                return None
        if not voucher:
            raise RemoteError("voucher", "this run admits by voucher; ask its host for an invite that holds one", peer)
        name = voucher_digest(voucher)
        held = self._books.vouchers.get(name)
        if held is None:
            raise RemoteError("voucher", "this run knows no voucher like that; ask its host for another invite", peer)
        if reason := refusal(held, now=time.time()):
            raise RemoteError("voucher", f"the voucher {name[:8]} {reason}; ask the host for another", peer)
        return name

    def _fewest(self) -> int:
        counts = [len(self._progress.present(stage=stage)) for stage in range(self._num_stages)]
        if self._justice.has_members:  # where nobody is, nobody examines a newcomer
            counts = [count or MAX_IDENTITIES for count in counts]
        return counts.index(min(counts))
