"""Vouchers: secrets that the host gives away, each of which admits a few peers."""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass

from bootstrap.program.books import Books, Voucher
from bootstrap.program.ledger import Ledger
from swarm.core.canonical import Value
from swarm.core.errors import SettingsError
from swarm.proto import host_pb2 as pb

VOUCHER_BYTES = 15
MAX_VOUCHERS = 1 << 14
MAX_USES = 4096
MAX_DAYS = 3650.0
MAX_NOTE_CHARACTERS = 256
SHOWN_NAME = 12
"""Characters of a name that tell it from all others."""
DAY_S = 86400.0


@dataclass(frozen=True)
class Vouchers:
    """Those of one run, whose ledger and books these are."""

    ledger: Ledger
    books: Books

    def create_voucher(self, *, uses: int, days: float, note: str) -> str:
        """A new voucher's secret, which is written nowhere. Raises SettingsError."""
        if not (1 <= uses <= MAX_USES and 0 < days <= MAX_DAYS):
            raise SettingsError(f"--uses {uses} --days {days:g}: give 1 to {MAX_USES}, and up to {MAX_DAYS:g}")
        if len(self._held()) >= MAX_VOUCHERS:
            raise SettingsError(f"this run has {MAX_VOUCHERS} vouchers, which is the most; begin another run")
        secret = secrets.token_hex(VOUCHER_BYTES)
        facts: dict[str, Value] = {
            "digest": voucher_digest(secret),
            "note": note[:MAX_NOTE_CHARACTERS],
            "uses": uses,
            "expires_at": time.time() + days * DAY_S,
        }
        self.ledger.append("voucher", facts)
        return secret

    def list_vouchers(self) -> list[pb.Voucher]:
        """All of them, in the order in which they were made."""
        return [
            pb.Voucher(
                name=name[:SHOWN_NAME],
                note=voucher.note,
                uses=voucher.uses,
                used_by=voucher.used_by,
                state=refusal(voucher, now=time.time()) or "is good",
            )
            for name, voucher in self._held().items()
        ]

    def revoke_voucher(self, name: str) -> str:
        """Revoke the voucher whose secret, or the beginning of whose name, is given; its name. Raises SettingsError."""
        held, digest = self._held(), voucher_digest(name)
        found = [one for one in held if one.startswith(name) or hmac.compare_digest(one, digest)]
        if len(name) < 4 or len(found) != 1:
            raise SettingsError(
                f"{name}: {len(found)} vouchers of this run are called so; `swarm ticket list` names them"
            )
        if not held[found[0]].revoked:
            self.ledger.append("voucher_revoked", {"digest": found[0]})
        return found[0][:SHOWN_NAME]

    def _held(self) -> dict[str, Voucher]:
        self.books.catch_up(self.ledger)
        return self.books.vouchers


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
