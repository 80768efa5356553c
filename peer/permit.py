"""This is where the peer's work asks before each microbatch whether its owner lets it begin."""

import asyncio
from collections.abc import Callable


class Permit:
    """The owner's leave to begin microbatches: given until it is withheld. Changed on the event loop, read anywhere."""

    def __init__(self) -> None:
        self.withheld = ""
        """Why no microbatch may begin; empty while one may."""
        self.changed = asyncio.Event()
        """Set at the next change, and replaced."""
        self.on_change: list[Callable[[], None]] = []

    def give(self) -> None:
        """Microbatches may begin."""
        self._change("")

    def withhold(self, reason: str) -> None:
        """No microbatch begins from now on; those that have begun go on to their end."""
        assert reason
        self._change(reason)

    def _change(self, withheld: str) -> None:
        turned = bool(withheld) != bool(self.withheld)
        self.withheld = withheld
        if turned:
            self.changed.set()
            self.changed = asyncio.Event()
            for tell in self.on_change:
                tell()
