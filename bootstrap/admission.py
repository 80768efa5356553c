"""This is where the host decides who may take part, and in which stage: the same for every door a peer comes by."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootstrap.books import Books, Voucher
from bootstrap.justice import Justice
from bootstrap.ledger import Ledger
from bootstrap.progress import PeerFigures, RunProgress
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId, StageIndex
from swarm.identity import is_peer_id
from verification.ticket import Ticket

VOUCHER_BYTES = 15
MAX_IDENTITIES = 1 << 16
"""That a run ever admits: the books hold each for ever."""
MAX_VOUCHERS = 1 << 14
MAX_USES = 4096
DAY_S = 86400.0


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
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self.policy = policy
        self._num_stages = num_stages
        self._ledger = ledger
        self._books = books
        self._progress = progress
        self._justice = justice
        self._emit = emit

    def admit(
        self, peer: PeerId, wish: int | None, chain_end: bytes, voucher: str, *, asked_at_ms: int | None = None
    ) -> Ticket:
        """The peer's ticket, for the stage it wishes or the one that has fewest. Whoever calls knows who the peer is.

        `asked_at_ms` is what the peer signed its request with, where that came as a paper that could be sent again.
        Raises RemoteError for a peer that is not admitted.
        """
        self._books.catch_up(self._ledger)  # of `swarm ticket`, which writes from a process of its own
        held = self._books.peers.get(peer)
        if self._books.is_shut_out(peer):
            raise RemoteError("standing", f"{peer} is shut out of this run", peer)
        if held is not None and asked_at_ms is not None and asked_at_ms <= held.asked_at_ms:
            raise RemoteError("replay", f"{peer} has sent this admission request, or a later one, before", peer)
        if held is None and len(self._books.peers) >= MAX_IDENTITIES:
            raise TransientError(f"this run has admitted {MAX_IDENTITIES} identities, and takes no more")
        shown = None if held is not None else self._check(peer, voucher)
        if wish is None:
            wish = held.stage if held is not None else self._fewest()
        ticket = self._justice.admit(peer, StageIndex(wish), chain_end)
        now = time.time()
        self._progress.peers[peer] = PeerFigures(wish, now, now)
        asked_at_ms = asked_at_ms or (held.asked_at_ms if held is not None else 0)
        if held is None or (held.stage, held.asked_at_ms) != (wish, asked_at_ms):
            facts: dict[str, Value] = {"peer": peer, "stage": wish, "voucher": shown, "asked_at_ms": asked_at_ms}
            self._ledger.append("admitted", facts)
            self._books.catch_up(self._ledger)
        self._emit({"event": "admitted", "peer_id": peer, "stage": wish})
        return ticket

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
        return counts.index(min(counts))


def refusal(voucher: Voucher, *, now: float) -> str | None:
    """Why the voucher admits nobody any more."""
    if voucher.revoked:
        return "is revoked"
    if now >= voucher.expires_at:
        return "has expired"
    if len(voucher.used_by) >= voucher.uses:
        return f"has admitted {voucher.uses} already"
    return None


def voucher_digest(secret: str) -> str:
    """Name of a voucher: from it nobody gets the secret back."""
    return hashlib.sha256(b"homeswarm/voucher\0" + secret.encode()).hexdigest()


def create_voucher(ledger: Ledger, books: Books, *, note: str, uses: int, days: float) -> str:
    """A new voucher's secret, which is written nowhere. Raises SettingsError."""
    if len(books.vouchers) >= MAX_VOUCHERS:
        raise SettingsError(f"this run has {MAX_VOUCHERS} vouchers, which is the most; begin another run")
    secret = secrets.token_hex(VOUCHER_BYTES)
    facts: dict[str, Value] = {
        "digest": voucher_digest(secret),
        "note": note,
        "uses": uses,
        "expires_at": time.time() + days * DAY_S,
    }
    ledger.append("voucher", facts)
    books.catch_up(ledger)
    return secret


def revoke_voucher(ledger: Ledger, books: Books, name: str) -> str:
    """Revoke the voucher whose secret, or the beginning of whose name, is given; its name. Raises SettingsError."""
    found = [
        held for held in books.vouchers if held.startswith(name) or hmac.compare_digest(held, voucher_digest(name))
    ]
    if len(name) < 4 or len(found) != 1:
        raise SettingsError(f"{name}: {len(found)} vouchers of this run are called so; `swarm ticket list` names them")
    if not books.vouchers[found[0]].revoked:
        ledger.append("voucher_revoked", {"digest": found[0]})
        books.catch_up(ledger)
    return found[0]
