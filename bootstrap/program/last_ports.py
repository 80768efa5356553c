"""The ports that a run's host had: where any would do it takes these again, for its peers and its invite name them."""

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from swarm.disk.whole_file import whole_file
from swarm.network.addresses import is_free

log = logging.getLogger(__name__)

PORTS = "ports.json"
FREED_WITHIN_S = 3.0
"""What a host that was killed leaves behind is gone by then."""
LOOK_AGAIN_S = 0.1


class LastPorts:
    """In the run's folder, by what listens there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PORTS

    def note(self, ports: Mapping[str, int]) -> None:
        if ports != self._noted():
            with whole_file(self._path) as partial:
                partial.write_text(json.dumps(dict(ports)) + "\n")

    async def free(self, what: str, host: str) -> int:
        """The port that `what` had at this numeric address, once nothing listens there; 0 if it had none, or something
        goes on listening."""
        port = self._noted().get(what, 0)
        for _ in range(round(FREED_WITHIN_S / LOOK_AGAIN_S)):
            if port == 0 or is_free(host, port):
                return port
            await asyncio.sleep(LOOK_AGAIN_S)
        log.warning(
            "port %d of %s, which this host had, is taken: who knows it by that needs the new invite", port, what
        )
        return 0

    def _noted(self) -> dict[str, int]:
        try:
            found = json.loads(self._path.read_text())
            return {str(what): int(port) for what, port in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
