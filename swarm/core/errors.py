"""Failures, told apart by who can mend them.

`ValueError` (here: `SettingsError`) is a user's setting, `LocalError` our own fault, `RemoteError` a
peer's fault, `TransientError` something worth another try.
"""

from swarm.core.ids import PeerId

KINDS = frozenset(
    {
        *("amended", "anchor", "banned", "certificate", "debt", "digest", "draw", "equivocation", "evidence", "exam"),
        *("expired", "fork", "gone", "layout", "malformed", "not-finite", "over", "papers", "past", "plea", "protocol"),
        *("run_id", "run_key", "served", "signature", "standing", "state", "ticket", "too_large", "too_many"),
        *("transient", "unknown", "unseen", "verdict", "voucher", "withdrawn"),
    }
)
"""Of remote errors. What counts them has room for each: a peer that answers with an error of its own word adds none."""


class SettingsError(ValueError):
    """A setting cannot be used. The message names the field, its value and the remedy."""


class NotFreeError(SettingsError):
    """It cannot be used now: this machine has what it needs, but others hold it. Once they let go, it can."""


class LocalError(Exception):
    """This process cannot do what it was asked to."""


class NotRunningError(LocalError):
    """The daemon or host that was to be asked does not run here."""


class ShutOutError(LocalError):
    """The run does not let this peer take part any more."""


class RemoteError(Exception):
    """A peer sent something wrong. `peer_id` is who; `kind` is one of `KINDS`, for counters and evidence."""

    def __init__(self, kind: str, message: str, peer_id: PeerId | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.peer_id = peer_id


class UpgradeNeeded(LocalError):
    """This release cannot take part in the run; the message names the command that upgrades, or the release."""


class TransientError(Exception):
    """Not now: a peer is gone, busy or late. Try again, perhaps elsewhere."""


class UnreachableError(TransientError):
    """A peer cannot be dialled, broke off, or was silent past the deadline: unlike one that answers "not now"."""


class AmendedError(TransientError):
    """The run has been amended, and more amendments are in force than this process knows."""

    def __init__(self, told_by: PeerId) -> None:
        """`told_by` knows them."""
        super().__init__("the run has been amended: it is joined anew")
        self.told_by = told_by


class MemoryFullError(TransientError):
    """There was no memory for it, here and now, the host's or a GPU's. Nothing has come of it."""


class DiskFullError(TransientError):
    """The disk takes no more. Whoever makes room need not be told to start anything again."""
