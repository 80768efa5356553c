"""A stage's certified results on disk: the bytes of the last ones, and for much longer what is signed of them.

With a snapshot they make the newest version again after every process that held it has ended. What is signed, some
kilobytes a step, also lets a host that was away follow the stage, step by step.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from swarm.checkpoint.state import Bytes
from swarm.core.canonical import Packed, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item
from swarm.core.round.contribution import Result
from swarm.core.state.stage_chain import StageChain
from swarm.disk.mapped_file import mapped
from swarm.disk.whole_file import whole_file

log = logging.getLogger(__name__)

MOST_SIGNED_BYTES = 64 << 20
"""Of one stage's results without their parts; the oldest go first."""
MOST_AT_ONCE_BYTES = 2 << 20
"""In one answer, but for a single result that is longer."""
MOST_RESULT_BYTES = 16 << 20
MOST_PARTS = 1 << 16
SIGNED, PARTS = ".result", ".parts"

WithParts = tuple[Result, list[Bytes]]


class ResultStore(Mapping[int, WithParts]):
    """The last results of one stage by step, with the encoded parts; of one lineage at a time.

    `keep` and the mapping are for the event loop, `write` for another thread: till a result is on disk it is here.
    """

    def __init__(
        self, folder: Path, chain: StageChain, *, kept: int, most_signed_bytes: int = MOST_SIGNED_BYTES
    ) -> None:
        """Goes on with what is in `folder` of the chain's lineage.

        `kept`: results whose parts stay; 0 for who only reads what is signed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._kept = kept
        self._most_signed_bytes = most_signed_bytes
        self.begin_again(chain)

    def begin_again(self, chain: StageChain) -> None:
        """The stage begins at another version, or this peer does; what is on disk of this lineage counts.

        Who comes back alone in its stage is the only one that others, who are behind, can catch up from.
        """
        self._lineage = lineage_name(chain)
        self._held = self._leading_to(int(chain.version))
        self._signed: OrderedDict[int, int] = OrderedDict(
            (step, path.stat().st_size) for step, path in sorted(_by_step(self._folder, self._lineage, SIGNED).items())
        )

    def _leading_to(self, version: int) -> dict[int, WithParts]:
        """The results on disk up to the version, back to the first gap; at most as many as are kept."""
        found: dict[int, WithParts] = {}
        for step in range(version - 1, max(-1, version - 1 - self._kept), -1):
            kept = _with_parts(self._path(self._lineage, step, SIGNED))
            if kept is None:
                break
            result, parts, sizes = kept
            try:
                whole = mapped(parts)
            except OSError as error:
                log.warning("%s: not used: %s", parts, error)
                break
            if len(whole) != sum(sizes):
                break
            found[step] = result, cut(whole, sizes)
        return found

    def __getitem__(self, step: int) -> WithParts:
        return self._held[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, result: Result, bodies: Sequence[Bytes]) -> None:
        """The result of the step that comes next, in memory; `write` it soon."""
        step = int(result.roster.step)
        self._held[step] = result, list(bodies)
        for old in sorted(self._held)[: -self._kept]:
            del self._held[old]

    def write(self, step: int) -> None:
        """(any thread) Put a result that is held on disk, and read its parts from there from now on. Raises OSError."""
        held, lineage = self._held.get(step), self._lineage
        if held is None:
            return
        result, bodies = held
        parts, signed = self._path(lineage, step, PARTS), self._path(lineage, step, SIGNED)
        with whole_file(parts) as partial, partial.open("wb") as file:
            for body in bodies:
                file.write(body)
        # Written last: a result without its parts leads nowhere.
        packed = pack({"result": result.packed, "sizes": [len(body) for body in bodies]})
        with whole_file(signed) as partial:
            partial.write_bytes(packed)
        on_disk = cut(mapped(parts), [len(body) for body in bodies])
        if self._lineage == lineage and self._held.get(step) is held:
            self._held[step] = result, on_disk
            self._signed[step] = len(packed)
        self._forget(lineage)

    def signed_since(self, step: int, *, at_most: int) -> list[Packed]:
        """What is signed of `step` and the steps after it, as far as it is here without a gap and fits one answer."""
        found: list[Packed] = []
        left = MOST_AT_ONCE_BYTES
        while len(found) < at_most and (packed := self._signed_of(step + len(found))) is not None:
            left -= len(packed.data)
            if left < 0 and found:
                break
            found.append(packed)
        return found

    def _signed_of(self, step: int) -> Packed | None:
        held = self._held.get(step)
        if held is not None:
            return held[0].packed
        if step not in self._signed:
            return None
        read = read_signed(self._path(self._lineage, step, SIGNED))
        return read[0].packed if read is not None else None

    def _forget(self, lineage: str) -> None:
        for step in sorted(_by_step(self._folder, lineage, PARTS))[: -self._kept]:
            self._path(lineage, step, PARTS).unlink(missing_ok=True)
        if self._lineage != lineage:
            return
        while sum(self._signed.values()) > self._most_signed_bytes and len(self._signed) > 1:
            oldest, _ = self._signed.popitem(last=False)
            self._path(lineage, oldest, SIGNED).unlink(missing_ok=True)

    def forget_others(self) -> None:
        """(any thread) Of other lineages, once a state of this one is whole on disk."""
        for path in self._folder.glob("results-*"):
            if not path.name.startswith(self._lineage):
                path.unlink(missing_ok=True)

    def _path(self, lineage: str, step: int, suffix: str) -> Path:
        return self._folder / f"{lineage}-{step:08d}{suffix}"


def lineage_name(chain: StageChain) -> str:
    """What the names of a lineage's files begin with."""
    return f"results-{chain.stage}-{chain.lineage.hex()[:16]}"


def results_on(folder: Path, chain: StageChain) -> Iterator[tuple[Result, Path, list[int]]]:
    """What is kept in `folder` of the steps from the chain's version on, without a gap: the result, the file of its
    parts and their sizes."""
    lineage = lineage_name(chain)
    signed, step = _by_step(folder, lineage, SIGNED), int(chain.version)
    while step in signed:
        kept = _with_parts(signed[step])
        if kept is None:
            return
        yield kept
        step += 1


def _with_parts(signed: Path) -> tuple[Result, Path, list[int]] | None:
    """A result, the file of its parts and their sizes; None if one of the two files is torn or gone."""
    parts = signed.with_suffix(PARTS)
    read = read_signed(signed) if parts.exists() else None
    return (read[0], parts, read[1]) if read is not None else None


def read_signed(path: Path) -> tuple[Result, list[int]] | None:
    """A result and the sizes of its parts; None if the file is torn or gone."""
    try:
        fields = Fields("kept result", unpack(path.read_bytes(), max_bytes=MOST_RESULT_BYTES))
        result = Result.from_value(fields.message("result"))
        sizes = list(fields.items("sizes", integer_item, max_items=MOST_PARTS))
        fields.done()
    except (OSError, RemoteError) as error:
        log.warning("%s: not used: %s", path, error)
        return None
    return result, sizes


def cut(whole: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """Bytes that stand end to end, in pieces of these sizes."""
    pieces: list[Bytes] = []
    at = 0
    for size in sizes:
        pieces.append(whole[at : at + size])
        at += size
    return pieces


def _by_step(folder: Path, lineage: str, suffix: str) -> dict[int, Path]:
    found = {}
    for path in folder.glob(f"{lineage}-*{suffix}"):
        number = path.stem.rpartition("-")[2]
        if number.isdigit():
            found[int(number)] = path
    return found
