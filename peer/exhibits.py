"""This is where a peer keeps what its contributions were made from, until nobody can ask for it any more."""

from collections.abc import Sequence

from swarm.core.ids import MicrobatchId, Step
from swarm.core.settings import RunSettings
from verification.papers import Bytes, Exhibit


class ExhibitStore:
    """The exhibits of the last steps, and the encoded parts of the contributions they went into."""

    def __init__(self, *, retained_versions: int, max_exhibits: int) -> None:
        self._retained = retained_versions
        self._max_exhibits = max_exhibits
        self._exhibits: dict[Step, dict[MicrobatchId, Exhibit]] = {}
        self._parts: dict[Step, Sequence[Bytes]] = {}

    @classmethod
    def of_run(cls, settings: RunSettings) -> "ExhibitStore":
        """Large enough for a peer that does all of its stage's work; without exhibits where nothing is replayed."""
        kept = settings.audits.retained_versions
        most = settings.microbatches_per_step * (kept + 2) if settings.replays else 0
        return cls(retained_versions=kept, max_exhibits=most)

    @property
    def num_bytes(self) -> int:
        """In exhibits."""
        return sum(exhibit.num_bytes for held in self._exhibits.values() for exhibit in held.values())

    def keep(self, step: Step, exhibit: Exhibit) -> None:
        """A microbatch that counts in `step` is done. One too many for the store is not kept: it becomes a debt."""
        if sum(map(len, self._exhibits.values())) < self._max_exhibits:
            self._exhibits.setdefault(step, {})[exhibit.papers.birth.microbatch_id] = exhibit

    def keep_parts(self, step: Step, parts: Sequence[Bytes]) -> None:
        """The encoded parts of what this peer contributed to `step`."""
        self._parts[step] = parts

    def exhibit(self, step: Step, microbatch_id: MicrobatchId) -> Exhibit | None:
        return self._exhibits.get(step, {}).get(microbatch_id)

    def part(self, step: Step, index: int) -> Bytes | None:
        parts = self._parts.get(step, ())
        return parts[index] if index < len(parts) else None

    def forget(self, version: int) -> None:
        """The stage is at `version`: what is too old to be asked for goes."""
        oldest = version - 1 - self._retained
        for step in [step for step in self._exhibits if int(step) < oldest]:
            del self._exhibits[step]
        for step in [step for step in self._parts if int(step) < oldest]:
            del self._parts[step]
