"""The weights that audits of the last steps are computed on.

They were in use a moment ago and nothing writes to them again. They go to disk and are read from there when an audit
needs them: building them again would cost all steps since the last snapshot.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from swarm.core.errors import LocalError
from swarm.core.ids import Version
from swarm.core.settings import RunSettings
from swarm.disk.whole_file import whole_file
from swarm.optim.carried_moments import Carried
from verification.replay.stage_replay import StageReplay

Floats = NDArray[np.float32]
Value = TypeVar("Value", np.float32, np.uint8)

PAST = "past-"
"""What their files' names begin with."""


@dataclass(frozen=True)
class PastVersion:
    """A version that the stage has left behind."""

    weights: Floats
    """Flat and read-only."""
    ahead: Floats | None
    """What the step after the version's was computed on, if that was not `weights`."""
    ahead_is_known: bool
    """Not if the state was loaded in an extrapolating run: it also needs the version before."""
    carried: Carried | None = None
    """What windows from it begin with besides the weights."""


@contextmanager
def standing_on(replay: StageReplay, kept: Mapping[Version, PastVersion]) -> Iterator[None]:
    """The replay holds these versions, and lets go of them in the end: it keeps no weights between audits."""
    try:
        for version, past in kept.items():
            replay.hold(version, past.weights, past.ahead, ahead_is_known=past.ahead_is_known, carried=past.carried)
        yield
    finally:
        replay.release()


class PastWeights:
    """The last `recent` versions before the present one, and those that are wanted longer.

    What is audited belongs to a step that has just ended, so its versions are here when it is drawn; `want` keeps them
    until the audit is made. An audit is left out after `retained_versions`, so at most that many and two are held.
    """

    def __init__(self, recent: int, folder: Path | None = None) -> None:
        """`folder`: where they lie once they are written, and nothing of an earlier process stays; None: in memory."""
        self._recent = recent
        self._folder = folder
        if folder is not None:
            for left in folder.glob(f"{PAST}*"):
                left.unlink(missing_ok=True)
        self._changing = threading.Lock()
        self._writing = threading.Lock()
        """One at a time: the next step may end before what the last one left behind is written."""
        self._held: dict[int, PastVersion] = {}
        self._wanted: dict[str, frozenset[int]] = {}
        """By who wants them."""

    @classmethod
    def of_run(cls, settings: RunSettings, folder: Path | None) -> "PastWeights":
        """For audits of the step that has just ended; nothing where nothing is replayed."""
        return cls(1 + (settings.averaging.delay > 0) if settings.replays else 0, folder)

    @property
    def versions(self) -> list[int]:
        return sorted(self._held)

    def remember(self, version: int, past: PastVersion) -> None:
        """The stage has left `version`."""
        with self._changing:
            self._held[version] = past
        self._forget(version)

    def write(self) -> None:
        """(any thread) Put what is held in memory on disk, and read it from there from now on. Raises OSError."""
        if self._folder is None:
            return
        with self._writing:
            with self._changing:
                unwritten = [one for one in self._held.items() if not isinstance(one[1].weights, np.memmap)]
            for version, past in unwritten:
                if self._held.get(version) is not past:
                    continue
                there, carried = _paths(self._folder, version), past.carried
                mapped = replace(
                    past,
                    weights=self._mapped(there.weights, past.weights),
                    ahead=None if past.ahead is None else self._mapped(there.ahead, past.ahead),
                    carried=carried and replace(carried, encoded=self._mapped(there.carried, carried.encoded)),
                )
                with self._changing:
                    if self._held.get(version) is past:
                        self._held[version] = mapped
                    else:
                        self._remove(version)

    @staticmethod
    def _mapped(path: Path, values: NDArray[Value]) -> NDArray[Value]:
        """Mapped before it is in place: from then on it may be removed."""
        with whole_file(path) as partial:
            partial.write_bytes(values.data)
            return np.memmap(partial, dtype=values.dtype, mode="r")

    def _remove(self, version: int) -> None:
        """Its files, but not one that is being written. What reads them goes on."""
        if self._folder is not None:
            for path in _paths(self._folder, version):
                path.unlink(missing_ok=True)

    def want(self, versions: Iterable[int], *, by: str) -> None:
        """Of those held now, audits that are due need these; earlier wishes of the same are over."""
        self._wanted[by] = frozenset(versions)
        self._forget(max(self._held, default=0))

    def get(self, version: int) -> PastVersion:
        """Raises LocalError if it is not held: the peer joined after it, or it was not wanted in time."""
        held = self._held.get(version)
        if held is None:
            raise LocalError(f"weights of version {version} are not held any more, those of {self.versions} are")
        return held

    def clear(self) -> None:
        """What was held may be wrong: another state has been loaded."""
        with self._changing:
            for version in self.versions:
                del self._held[version]
                self._remove(version)

    def _forget(self, last: int) -> None:
        wanted = frozenset[int]().union(*self._wanted.values())
        with self._changing:
            for version in self.versions:
                if version <= last - self._recent and version not in wanted:
                    del self._held[version]
                    self._remove(version)


class _Paths(NamedTuple):
    """Of a version's arrays."""

    weights: Path
    ahead: Path
    carried: Path


def _paths(folder: Path, version: int) -> _Paths:
    name = f"{PAST}{version:08d}"
    return _Paths(folder / name, folder / f"{name}-ahead", folder / f"{name}-carried")
