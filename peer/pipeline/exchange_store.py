"""A peer's calls with the stages beside it, kept until nobody can draw them any more.

It keeps each from the moment that somebody may hold a header over it: what counted, what came late, what was sent
twice. So an honest peer can always show what it signed for and what its contributions were made from, and a neighbour
what a liar sent it.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.round.contribution import Work
from swarm.core.settings import RunSettings
from swarm.data.batches import Batch
from swarm.disk.cold_bytes import ColdBytes
from verification.pipeline.exchanges import MAX_EXCHANGES, Exchange, exhibit_of
from verification.pipeline.headers import BirthRecord, HopHeader, ids_bytes
from verification.round.papers import Bytes, Exhibit, Papers

EXCHANGES = "exchanges"
"""What the files of their bytes begin with."""
MAX_CALLS = 2 * MAX_EXCHANGES
"""Of one microbatch, that came and that went."""


class ExchangeStore:
    """The exchanges of the last steps."""

    def __init__(
        self,
        me: PeerId,
        *,
        retained_versions: int,
        max_microbatches: int,
        batch: Callable[[MicrobatchId], Batch] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`batch`: at stage 0, where nothing comes in, what a microbatch is made from instead.

        `folder`: where the bytes of answered calls lie, and nothing of an earlier process stays; None: in memory.
        """
        self._me = me
        self._batch = batch
        self._retained = retained_versions
        self._max_microbatches = max_microbatches
        self._held: dict[Step, dict[MicrobatchId, dict[bytes, Exchange]]] = {}
        """Of a microbatch, by the digest of the activation's header; an answer after the first, by that of its own."""
        self._cold = ColdBytes(folder, EXCHANGES)
        """Their bytes on disk, in a file for each step: that goes once its step is too old, and nobody reads in it."""
        self._written = -1
        """The newest step that is there."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=EXCHANGES) if folder is not None else None
        self._changing = threading.Lock()
        self._born: dict[Step, dict[bytes, tuple[BirthRecord, Bytes]]] = {}
        """In a run of one stage, where nothing is sent: what began here, with its targets, by the record's digest."""

    @classmethod
    def of_run(
        cls,
        settings: RunSettings,
        me: PeerId,
        batch: Callable[[MicrobatchId], Batch] | None = None,
        folder: Path | None = None,
    ) -> "ExchangeStore":
        """Large enough for a peer that does all of its stage's work, twice; for nothing where nothing is replayed."""
        kept = settings.audits.retained_versions
        most = 2 * settings.microbatches_of_one * (kept + 2) if settings.replays else 0
        return cls(me, retained_versions=kept, max_microbatches=most, batch=batch, folder=folder)

    def has_room(self, step: Step, microbatch_id: MicrobatchId, *, coming: int = 0, calls: int = 0) -> bool:
        """Whether a call of the microbatch, which may be sent on and on, could be shown when others are kept that are
        under way: of so many microbatches, and so many of this one."""
        if not self._max_microbatches:
            return True  # nobody asks
        held = self._held.get(step, {}).get(microbatch_id)
        if held is not None:
            return len(held) + calls < MAX_CALLS
        return sum(map(len, self._held.values())) + coming < self._max_microbatches and calls < MAX_CALLS

    def keep(self, exchange: Exchange) -> bool:
        """A call that was made or came, or its answer. False if it cannot be shown: then nobody may get a header."""
        birth = exchange.birth
        key = exchange.forward.digest()
        known = self._held.get(birth.step, {}).get(birth.microbatch_id, {}).get(key)
        if known is None and not self.has_room(birth.step, birth.microbatch_id):
            return False
        if known is not None and known.gradient is not None:  # perhaps what was contributed: another is kept beside it
            if exchange.gradient is None:
                return True
            key = key if exchange.gradient == known.gradient else exchange.gradient.digest()
        if self._max_microbatches:
            with self._changing:
                self._held.setdefault(birth.step, {}).setdefault(birth.microbatch_id, {})[key] = exchange
            # What is not answered yet is in memory all the same: the microbatch is under way.
            if self._writer is not None and exchange.gradient is not None:
                self._writer.submit(self._write, exchange, key)
        return True

    def _write(self, exchange: Exchange, key: bytes) -> None:
        """(its own thread) Put its bytes on disk, and read them from there from now on."""
        step, number = exchange.birth.step, exchange.birth.microbatch_id
        if step not in self._held:
            return
        if int(step) > self._written:
            self._written = int(step)
            self._cold.begin_anew()
        activation, targets, answer = (self._cold.put(memoryview(body)) for body in exchange.bodies)
        kept = replace(exchange, activation=activation, targets=targets, answer=answer)
        with self._changing:
            calls = self._held.get(step, {}).get(number, {})
            if calls.get(key) is exchange:
                calls[key] = kept

    def keep_born(self, birth: BirthRecord, targets: Bytes) -> bool:
        """A microbatch that begins and ends here. False if it could not be shown."""
        if not self._max_microbatches:
            return True  # nobody asks
        if sum(map(len, self._born.values())) >= self._max_microbatches:
            return False
        self._born.setdefault(birth.step, {})[birth.digest()] = (birth, targets)
        return True

    def partners(self, step: Step, *, came: bool) -> list[tuple[PeerId, MicrobatchId]]:
        """Whose microbatches of a step came here, or (`came` False) to whom they went: sorted, each once."""
        return sorted(
            {
                (self._partner(exchange), number)
                for number, calls in self._held.get(step, {}).items()
                for exchange in calls.values()
                if self._has_come(exchange) == came
            }
        )

    def of(self, step: Step, microbatch_id: MicrobatchId) -> list[Exchange]:
        """Of a microbatch, all that came and went."""
        return list(self._held.get(step, {}).get(microbatch_id, {}).values())

    def with_partner(self, step: Step, microbatch_id: MicrobatchId, partner: PeerId) -> list[Exchange]:
        """Of a microbatch, with a peer of another stage; the first ones."""
        calls = self.of(step, microbatch_id)
        return [exchange for exchange in calls if self._partner(exchange) == partner][:MAX_EXCHANGES]

    def exhibit(self, step: Step, work: Work) -> Exhibit | None:
        """What an entry of this peer's contribution to a step was made from; None if not all of it is here."""
        calls = self.of(step, work.microbatch_id)
        born = self._born.get(step, {}).get(work.input_header)
        if born is not None:
            return self._of_born(work, *born)
        ids = ids_bytes(self._batch(work.microbatch_id)[0]) if self._batch is not None and calls else b""
        return exhibit_of(work, calls, calls, ids=ids)

    def own(self, microbatch_id: MicrobatchId, header: bytes) -> list[Exchange]:
        """What a header of this peer's is over, and what that was made from; whatever the step it was born for."""
        held = (exchange for calls in self._held.values() for exchange in calls.get(microbatch_id, {}).values())
        found = [(exchange, {one.digest(): one for one in _headers(exchange)}) for exchange in held]
        signed = next((bears[header] for _, bears in found if header in bears), None)
        shown: list[tuple[Exchange, Mapping[bytes, HopHeader]]] = []
        # One for each: a neighbour that sends the same again and again has many that bear its header.
        for named in (header, *signed.parents) if signed is not None else ():
            if not any(named in bears for _, bears in shown):
                shown += [one for one in found if named in one[1]][:1]
        return [exchange for exchange, _ in shown]

    def forget(self, version: int) -> None:
        """The stage is at `version`: what is too old to be asked for goes."""
        oldest = version - 1 - self._retained
        with self._changing:
            for step in [step for step in self._held if int(step) < oldest]:
                del self._held[step]
        if self._written < oldest:
            self._cold.begin_anew()
        for step in [step for step in self._born if int(step) < oldest]:
            del self._born[step]

    def close(self) -> None:
        """Show nothing any more, and let go of the thread and its files."""
        if self._writer is not None:
            self._writer.shutdown(cancel_futures=True)
            self._writer = None
        self._held.clear()
        self._born.clear()
        self._cold.begin_anew()

    def _of_born(self, work: Work, birth: BirthRecord, targets: Bytes) -> Exhibit:
        assert self._batch is not None
        ids = ids_bytes(self._batch(work.microbatch_id)[0])
        return Exhibit.of_bodies(Papers.received(birth, None), work.version, (ids, targets, b"", b"", b""))

    def _has_come(self, exchange: Exchange) -> bool:
        return exchange.forward.consumer == self._me

    def _partner(self, exchange: Exchange) -> PeerId:
        return exchange.forward.producer if self._has_come(exchange) else exchange.forward.consumer


def _headers(exchange: Exchange) -> tuple[HopHeader, ...]:
    return (exchange.forward,) if exchange.gradient is None else (exchange.forward, exchange.gradient)
