"""The owner's permit, which the peer's work asks for before each microbatch."""

import asyncio


class Permit:
    """The owner's leave to begin microbatches: given until it is withheld. Changed on the event loop, read anywhere."""

    def __init__(self) -> None:
        self.withheld = ""
        """Why no microbatch may begin; empty while one may."""
        self.changed = asyncio.Event()
        """Set at the next change, and replaced."""

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
