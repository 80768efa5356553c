"""One chunk of a stage's state computed again: from a few of an older one's, and certified results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from swarm.averaging.certified_gradient import certified_norm, said_of_moments
from swarm.averaging.encoded import Encoded
from swarm.averaging.parts import Parts
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import (
    CHUNK_BYTES,
    Bytes,
    StageState,
    arrays_of,
    chunk_hash,
    read_header,
    root_by_path,
)
from swarm.checkpoint.state_map import HEADER, Piece, StateMap
from swarm.core.errors import LocalError, RemoteError
from swarm.core.round.contribution import Result
from swarm.core.settings import OptimizerSettings, RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.core.state.step_rule import norms_after, why_skipped
from swarm.identity.key import verify
from swarm.manifest.signed_run import SignedRun
from swarm.model.layout import ParameterLayout
from swarm.model.stack import stage_layout
from swarm.optim.carried_moments import CARRIED, CarriedMoments, places_of_moments
from swarm.optim.stage_step import FlatGradient, StageStep, stage_clip_norm
from verification.kinds.step_fraud import OldChunk, StepFraud
from verification.state.past import Past

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Needs:
    """What a chunk is computed again from."""

    old_chunks: tuple[int, ...]
    parts: tuple[int, ...]


def _parts_of(piece: Piece, cut: Parts) -> dict[int, slice]:
    """Parts of moments that lie in a piece of those that are carried, and where they lie in them all."""
    places = zip(cut.moments, places_of_moments(cut), strict=True)
    return {part: place for part, place in places if place.start < piece.stop and piece.start < place.stop}


@dataclass(frozen=True)
class ChunkAgain:
    """What a chunk must be."""

    body: bytes
    total_bytes: int
    """Of the state that it is in."""


def needs_of(first_chunk: Bytes, chunk: int, *, layout: ParameterLayout, cut: Parts) -> Needs:
    """What chunk `chunk` of a later state needs of the one that begins with `first_chunk`. Raises RemoteError.

    From version to version nothing in a state changes its place: its header is padded to one size.
    """
    where = StateMap(read_header(layout, first_chunk))
    carried = [piece for piece in where.pieces(chunk) if piece.name == CARRIED]
    windows = [where.window_of(piece) for piece in where.pieces(chunk) if piece.name not in (HEADER, CARRIED)]
    chunks = {0, *(chunk for _ in carried)}.union(*(where.chunks_of(window) for window in windows))
    parts = {part for one in windows for part in cut.touching(one)}
    parts |= {part for piece in carried for part in _parts_of(piece, cut)}
    return Needs(tuple(sorted(chunks)), tuple(sorted(parts)))


def chunk_again(case: StepFraud, run: SignedRun) -> ChunkAgain:
    """Chunk `case.chunk` as an honest peer has it at the version of the statement.

    Raises RemoteError unless the run key's word and certified results lead there, by the version's name, and the old
    chunks and bodies are those that they name.
    """
    said, past, settings = case.statement, case.past, run.in_force
    first = past.first_chain(run)
    if first.stage != said.stage:
        raise RemoteError("evidence", f"a past of stage {first.stage}, a state of stage {said.stage}")
    layout = stage_layout(settings.model, said.stage)
    cut = Parts.of(settings, layout)
    names = _names(past, first, settings, len(cut))
    if (int(first.version) + len(past.results), names[-1]) != (int(said.version), said.name):
        raise RemoteError("fork", f"the past leads to another version than {said.version} that is stated")
    chunks = _checked_chunks(case.old_chunks, layout, past.beginning.state_digest)
    begun = replace(read_header(layout, chunks[0]), name=first.name)
    if begun.version != first.version or (settings.state_moment_bytes and not begun.moments):
        raise RemoteError("evidence", f"a state of version {begun.version} where the past begins at {first.version}")
    if case.chunk * CHUNK_BYTES >= StateMap(begun).total_bytes:
        raise RemoteError("evidence", f"the state has no chunk {case.chunk}")
    if Needs(tuple(sorted(chunks)), case.parts) != needs_of(chunks[0], case.chunk, layout=layout, cut=cut):
        raise RemoteError("evidence", f"chunks {sorted(chunks)} and parts {case.parts} are not what the chunk needs")
    steps = [
        CertifiedStep(
            name=name,
            norm=certified_norm(cut, result.parts),
            gradient=_gradient(result, dict(zip(case.parts, bodies, strict=True)), cut),
            moments=_moments(result, dict(zip(case.parts, bodies, strict=True)), cut),
        )
        for result, bodies, name in zip(past.results, case.bodies, names[1:], strict=True)
    ]
    clip_norm = stage_clip_norm(settings, said.stage)
    carried = CarriedMoments(settings, layout) if settings.has_windows else None
    return StepsAgain(settings.outer, clip_norm, begun, chunks, steps, cut, carried).chunk(case.chunk)


def _names(past: Past, chain: StageChain, settings: RunSettings, parts: int) -> list[bytes]:
    """Of the versions from the past's beginning on. Raises RemoteError unless every result follows, certified."""
    names = [chain.name]
    for result in past.results:
        facts = chain.facts(
            settings,
            num_parts=parts,
            phase_s=settings.deadlines.call_s,
        )
        facts.check_result(result, verify, certified=True)
        chain = chain.advance(result, settings)
        names.append(chain.name)
    return names


def _checked_chunks(shown: Sequence[OldChunk], layout: ParameterLayout, root: bytes) -> dict[int, Bytes]:
    """By index, each of them under the root. Raises RemoteError."""
    if not shown or shown[0].index != 0:
        raise RemoteError("evidence", "the first chunk of the old state is not there")
    total = StateMap(read_header(layout, shown[0].body)).total_bytes
    for old in shown:
        if root_by_path(chunk_hash(old.body), old.index, old.path, total) != root:
            raise RemoteError("digest", f"chunk {old.index} is not of the state that the run key signed for")
    return {old.index: old.body for old in shown}


def _gradient(result: Result, bodies: Mapping[int, Bytes], cut: Parts) -> dict[int, Floats] | None:
    """The result's values in these parts, as far as they are of the gradient; None if the round had no work. Raises
    RemoteError for other bytes."""
    found = dict[int, Floats]()
    for part, body in bodies.items():
        _check_body(result, part, body)
        if part in cut.moments:
            continue
        values = found[part] = np.zeros(cut.size(part), dtype=np.float32)
        if not len(body):
            continue
        try:
            cut.result_codec(part).decode(body, values)
        except RemoteError:  # certified all the same: zeros for everybody
            values[:] = 0.0
    return None if all(part.is_empty for part in result.parts) else found


def _moments(result: Result, bodies: Mapping[int, Bytes], cut: Parts) -> dict[int, Encoded | None]:
    """What the result says in these parts, as far as they are of moments."""
    named = {part: body for part, body in bodies.items() if part in cut.moments and result.parts}
    return {part: said_of_moments(cut, part, result.parts[part], body) for part, body in named.items()}


def _check_body(result: Result, part: int, body: Bytes) -> None:
    if not result.parts or result.parts[part].is_empty:
        if len(body):
            raise RemoteError("malformed", f"part {part} is empty, but comes with {len(body)} bytes")
    elif bulk_digest(body) != result.parts[part].digest:
        raise RemoteError("digest", f"part {part} of step {result.roster.step} differs from its digest")


@dataclass(frozen=True, kw_only=True)
class CertifiedStep:
    """What a step is taken with."""

    name: bytes
    """Of the version it makes."""
    norm: float
    """Of the whole gradient."""
    gradient: Mapping[int, Floats] | None
    """Its values in some parts; None: the round had no work."""
    moments: Mapping[int, Encoded | None] = field(default_factory=dict)
    """What some parts say of moments; None: they stay what they were."""


@dataclass(frozen=True)
class StepsAgain:
    """Steps taken again on a few of a state's chunks, by the code that replicas take them with."""

    optimizer: OptimizerSettings
    clip_norm: float
    begun: StageState
    """Before the steps. Of its arrays only their lengths count."""
    chunks: Mapping[int, Bytes]
    """Of its bytes: as many as are needed."""
    steps: Sequence[CertifiedStep]
    cut: Parts
    """Of the stage's values, in the steps' gradients."""
    carried: CarriedMoments | None = None
    """What the run's windows carry."""

    def chunk(self, index: int) -> ChunkAgain:
        """A chunk after the steps. Raises RemoteError if chunks are missing, or of another optimizer."""
        old = StateMap(self.begun)
        stepped = self._stepped(old, slice(0, 0))
        ahead = replace(
            self.begun,
            version=stepped.version,
            scalars=stepped.scalars,
            certified_norms=stepped.certified_norms,
            name=stepped.name,
        )
        new, found = StateMap(ahead), bytearray()
        for piece in new.pieces(index):
            if piece.name == HEADER:
                found += new.header[piece.start : piece.stop]
                continue
            if piece.name == CARRIED:
                found += self._carried_moments(old, piece)
                continue
            window = new.window_of(piece)
            state = self._stepped(old, window)
            found += new.cut(piece, dict(arrays_of(state)), window)
        return ChunkAgain(bytes(found), new.total_bytes)

    def _stepped(self, old: StateMap, window: slice) -> StageState:
        arrays, layout = old.arrays(self.chunks, window), self.begun.layout
        weights = arrays.pop("weights").astype(np.float32)
        state = replace(self.begun, weights=weights, moments=arrays)
        try:
            step = StageStep(self.optimizer, layout, clip_norm=self.clip_norm, window=window, carried=self.carried)
            if self.carried is None:
                step.restore(state)
        except LocalError as error:
            raise RemoteError("state", str(error)) from error
        for taken in self.steps:
            values = self._within(taken.gradient, window) if taken.gradient is not None else None
            gradient = FlatGradient(values, taken.norm) if values is not None else None
            state = step.next(state, gradient, taken.name).state
        return state

    def _carried_moments(self, old: StateMap, piece: Piece) -> bytes:
        """What of them lies in the piece."""
        found, norms = old.piece(piece, self.chunks).astype(np.uint8), self.begun.certified_norms
        for taken in self.steps:
            norm = taken.norm if taken.gradient is not None else None
            skipped = why_skipped(norm, norms, factor=self.optimizer.skip_norm_factor)
            norms = norms_after(norm, norms)
            for part, place in _parts_of(piece, self.cut).items():
                body = taken.moments.get(part)
                if skipped is not None or body is None:
                    continue
                start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
                said = np.frombuffer(body, dtype=np.uint8)[start - place.start : stop - place.start]
                found[start - piece.start : stop - piece.start] = said
        return found.tobytes()

    def _within(self, gradient: Mapping[int, Floats], window: slice) -> Floats:
        values = np.empty(window.stop - window.start, dtype=np.float32)
        for part in self.cut.touching(window):
            where = self.cut[part]
            start, stop = max(window.start, where.start), min(window.stop, where.stop)
            within = slice(start - where.start, stop - where.start)
            values[start - window.start : stop - window.start] = gradient[part][within]
        return values
