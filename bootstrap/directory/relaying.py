"""A host's relay for peers which cannot be dialled, kept to its budget."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bootstrap.directory.doors import seed_addresses
from swarm.core.errors import LocalError, SettingsError
from swarm.disk.durable_lines import replace_lines
from swarm.host_protocol import RelayOffer
from swarm.network.addresses import as_had
from swarm.network.identity_file import load_or_create_identity
from swarm.network.loop import happened
from swarm.network.p2pd.p2p import P2PTransport
from swarm.network.p2pd.relay import Relay

log = logging.getLogger(__name__)

CARRIED_FILE = "relayed"
KEY_FILE = "relay.key"
COUNT_EVERY_S = 1.0
SAVE_EVERY_BYTES = 16 << 20
RESTART_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RelaySettings:
    """What the host's owner allows."""

    listen: tuple[str, ...]
    """TCP multiaddresses."""
    budget_bytes: int
    """Of the whole run, both ways together; what is carried in the second in which it is used up comes on top."""
    bulk_bytes: int
    """Of it, for bulk: past that peers that keep to the protocol have it carry control alone."""
    public: str | None = None
    """Name or number by which strangers reach this machine; None: whichever of its addresses answers."""


class HostRelay:
    """The relay, and what it has carried over all starts of the host. Made by `open`."""

    def __init__(
        self, folder: Path, transport: P2PTransport, settings: RelaySettings, emit: Callable[[dict[str, Any]], None]
    ) -> None:
        self._folder = folder
        self._transport = transport
        self._settings = settings
        self._emit = emit
        self._relay: Relay | None = None
        self._offer: RelayOffer | None = None
        self._carried_before = self._saved = _load(folder / CARRIED_FILE)
        self.carried_bytes = self._carried_before

    @classmethod
    async def open(
        cls, folder: Path, transport: P2PTransport, settings: RelaySettings, emit: Callable[[dict[str, Any]], None]
    ) -> "HostRelay":
        """Relaying from now on, unless the budget is used up. Raises LocalError, or SettingsError as `Doors.open`."""
        made = cls(folder, transport, settings, emit)
        try:
            if made.left_bytes:
                await made._start()
        except BaseException:
            await made.close()
            raise
        return made

    @property
    def settings(self) -> RelaySettings:
        """With the ports that the relay listens at, if it runs."""
        if self._relay is None:
            return self._settings
        return replace(self._settings, listen=as_had(self._settings.listen, self._relay.addresses))

    @property
    def left_bytes(self) -> int:
        return max(0, self._settings.budget_bytes - self.carried_bytes)

    def offer(self) -> RelayOffer:
        """For a peer that cannot be dialled."""
        if not self.left_bytes:
            budget_gb = self._settings.budget_bytes / 1e9
            return RelayOffer(refusal=f"this host's relay budget of {budget_gb:g} GB is used up")
        if self._offer is not None:
            return replace(self._offer, carries_bulk=self.carried_bytes < self._settings.bulk_bytes)
        return RelayOffer(refusal="this host's relay is being started again; ask in a moment")

    def report(self) -> dict[str, int]:
        settings = self._settings
        return {
            "carried_bytes": self.carried_bytes,
            "budget_bytes": settings.budget_bytes,
            "bulk_budget_bytes": settings.bulk_bytes,
        }

    async def run(self) -> None:
        """Count, and end the relay when it has carried its budget. Never returns."""
        while self.left_bytes:
            try:
                if self._relay is None:
                    await self._start()
                await self._count()
            except (LocalError, SettingsError) as error:
                log.warning("%s; it is started again in %g s", error, RESTART_S)
                await self.close()
                await asyncio.sleep(RESTART_S)
        await self.close()
        log.warning("%s", self.offer().refusal)
        self._emit({"event": "relay", **self.report()})
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """No relay from now on; what it carried is on the disk."""
        relay, self._relay, self._offer = self._relay, None, None
        if relay is not None:
            await relay.stop()
            self._save()

    async def _start(self) -> None:
        identity = load_or_create_identity(self._folder / KEY_FILE)
        relay = await Relay.start(identity, self._settings.listen, self.left_bytes, self._transport)
        self._relay = relay
        addresses = await seed_addresses(relay.addresses, self._settings.public, self._emit)
        self._offer = RelayOffer(peer_id=relay.peer_id, addresses=tuple(addresses))
        self._carried_before = self.carried_bytes
        self._emit({"event": "relay", **self.report()})

    async def _count(self) -> None:
        """Until the budget is used up. Raises LocalError when the relay ends or does not tell."""
        assert self._relay is not None
        while self.left_bytes:
            if await happened(self._relay.ended, within_s=COUNT_EVERY_S):
                raise LocalError("the relay's p2pd has ended")
            self.carried_bytes = self._carried_before + await self._relay.carried_bytes()
            if self.carried_bytes - self._saved >= SAVE_EVERY_BYTES:
                self._save()

    def _save(self) -> None:
        replace_lines(self._folder / CARRIED_FILE, [str(self.carried_bytes)])
        self._saved = self.carried_bytes


def _load(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise LocalError(f"{path} holds no count of bytes ({error}); write what the relay has carried, or 0") from error
