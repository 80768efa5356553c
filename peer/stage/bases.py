"""What this peer's stage was known by at its last versions: who was a member, and what each had done."""

from collections import OrderedDict

from peer.stage.events import VersionTurned
from swarm.core.errors import TransientError
from swarm.core.kept import keep_newest
from swarm.core.round.basis import RoundBasis
from swarm.core.state.stage_chain import StageChain


class RecentBases:
    """By version, of the present beginning of the stage alone."""

    def __init__(self, chain: StageChain, *, kept: int) -> None:
        """`chain`: where this peer begins; `kept`: versions that are remembered."""
        self._kept = kept
        self._held = OrderedDict({int(chain.version): chain.basis})

    def turned(self, event: VersionTurned) -> None:
        """The stage is at another version here."""
        if not event.is_next:
            self._held.clear()
        self._held[int(event.chain.version)] = event.chain.basis
        keep_newest(self._held, self._kept)

    def at(self, version: int) -> RoundBasis:
        """Raises TransientError for a version that this peer was not at, or too long ago."""
        if version not in self._held:
            raise TransientError(f"who was a member at version {version} is not known here")
        return self._held[version]
