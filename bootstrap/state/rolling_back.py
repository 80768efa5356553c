"""How the host has a run go on from an earlier state, without some data: what its owner asks for.

The abandoned versions keep their numbers and names; the run goes on under a number that no stage has reached, with
geneses of a new era. So nothing that was signed in the one branch can be taken for something of the other, no audit's
draw is known beforehand, and a peer that hears of it late is behind, as any other that was away.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bootstrap.audit.justice import Justice
from bootstrap.owner.progress import RunProgress
from bootstrap.owner.trouble import Kind, Notice
from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
from bootstrap.round.following import Following
from bootstrap.state.amending import Amending
from bootstrap.state.archivist import Archivist
from bootstrap.state.beginning import Beginning, StageSource, StageStart, stage_start
from bootstrap.state.coming_back import ComingBack
from bootstrap.state.run_folder import PreparedRun, archived, leases_of
from bootstrap.state.telling import tell_all
from swarm.checkpoint.archive import INFO_FILE, checkpoint_path, checkpoints, read_checkpoint
from swarm.checkpoint.record import CheckpointRecord
from swarm.checkpoint.state import UNNAMED, StageState
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.coming_back import AHEAD, highest_said
from swarm.core.state.stage_chain import Genesis
from swarm.host_protocol import STANDING
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

Range = tuple[int, int]
"""Ids of microbatches, [start, stop)."""

HARMLESS: tuple[Kind, ...] = ("stalled", "not_finite", "left_out")
"""Notices of what has spoilt no weights, and what a single peer can bring about, or say, at any step."""
RECENT = 64
"""Steps back, in which what was noticed is taken for the trouble that the run is rolled back for."""
MOST_SKIPPED = 1 << 20
"""Microbatches, in one rollback."""
STANDING_S = 5.0
NEWEST = -1
"""In place of a version: the newest that all stages hold together, with whoever is there of a stage that was lost."""
MAX_DIGITS = 18
"""Of a version or a microbatch's id."""


@dataclass(frozen=True)
class Wish:
    """What the owner asks for."""

    to: int | None
    """The version to go back to, or `NEWEST`; None: the last that all stages have anchored before the trouble."""
    skip: tuple[Range, ...] | None
    """Microbatches that nobody is to take again; None: those of the steps that went wrong, and of the one before."""

    @classmethod
    def from_texts(cls, to: str, skip: str) -> "Wish":
        """Of --to and --skip. Raises SettingsError."""
        return cls(_read_version(to), _read_ranges(skip))


def _read_version(text: str) -> int | None:
    if text == "last-anchor":
        return None
    if text == "newest":
        return NEWEST
    if _is_number(text):
        return int(text)
    raise SettingsError(f"--to {text}: give a version, such as 96, last-anchor or newest")


def _read_ranges(text: str) -> tuple[Range, ...] | None:
    """In order."""
    if text == "auto":
        return None
    if text == "none":
        return ()
    found: list[Range] = []
    for one in text.split(","):
        first, _, stop = one.partition(":")
        if not (_is_number(first) and _is_number(stop) and int(first) < int(stop)):
            raise SettingsError(f"--skip {one}: give FIRST:STOP, such as 480:512, auto or none")
        found.append((int(first), int(stop)))
    return tuple(sorted(found))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    to: int
    skip: tuple[Range, ...]


def plan(
    wish: Wish, *, versions: Sequence[int], notices: Iterable[Notice], ids_of: Callable[[int], Iterable[int]]
) -> Plan:
    """What the wish comes to, given the `versions` there are and what was noticed lately of the present branch.

    Losses count first: a step that was skipped has done no harm. `ids_of` a step are its microbatches. Raises
    SettingsError for a wish that cannot be granted.
    """
    known = [notice for notice in notices if notice.kind not in HARMLESS]
    spikes = [notice for notice in known if notice.kind == "loss_spike"]
    steps = sorted({max(0, step) for notice in spikes or known for step in (notice.step - 1, notice.step)})
    if wish.skip is None and not steps:
        raise SettingsError("--skip auto: nothing was noticed lately; name the data, --skip FIRST:STOP or --skip none")
    before = steps[0] if wish.skip is None else max(versions, default=0)
    possible = [version for version in versions if version <= before or wish.to is not None]
    to = max(possible, default=None) if wish.to is None else wish.to
    if to is None or to not in versions:
        there = ", ".join(map(str, versions)) or "none"
        asked = f"--to {to}" if wish.to is not None else f"--to last-anchor, up to {before}"
        raise SettingsError(f"{asked}: no such version is kept; choose one of {there}")
    if wish.skip is not None:
        if sum(stop - start for start, stop in wish.skip) > MOST_SKIPPED:
            raise SettingsError(f"--skip: more than {MOST_SKIPPED} microbatches; skip less")
        return Plan(to, wish.skip)
    return Plan(to, _ranges(number for step in steps if step >= to for number in ids_of(step)))


def _ranges(ids: Iterable[int]) -> tuple[Range, ...]:
    found: list[Range] = []
    for number in sorted(set(ids)):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


@dataclass(frozen=True)
class _Asked:
    """A wish, and what came of it once that is known."""

    wish: Wish
    outcome: asyncio.Future[str]


@dataclass(frozen=True, kw_only=True)
class RollingBack:
    """Carries the owner's wishes out, one after the other."""

    run: PreparedRun
    transport: Transport
    ledger: Ledger
    progress: RunProgress
    justice: Justice
    followed: Following
    archivist: Archivist
    beginning: Beginning
    coming_back: ComingBack
    amending: Amending
    books: Callable[[], Books]
    """As of now."""
    notices: Callable[[], Iterable[Notice]]
    begin: Callable[[list[Genesis], Sequence[StageSource], Value], None]
    """Told the new geneses, the states they name, and why they are: they count from then on."""
    emit: Callable[[dict[str, Any]], None]
    _asked: asyncio.Queue[_Asked] = field(default_factory=asyncio.Queue, init=False)
    _at_work: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def ask(self, wish: Wish) -> str:
        """What came of it. It goes on where nobody waits for that any more.

        Raises SettingsError for a wish that cannot be granted, TransientError if another is being carried out, and what
        else kept it from being done as LocalError, RemoteError or TransientError.
        """
        if not self.beginning.made.is_set():
            raise SettingsError("the run has not begun: there is nothing to go back from")
        if self.progress.done_versions() >= self.run.settings.optimizer.total_steps:
            raise SettingsError("the run is over: there is nothing to go on with")
        if self.amending.pending is not None:
            raise SettingsError("the run is being amended: go back once that is done")
        if self._at_work.locked() or not self._asked.empty():
            raise TransientError("a rollback is under way, or its peers are still being told; try again in a minute")
        asked = _Asked(wish, asyncio.get_running_loop().create_future())
        self._asked.put_nowait(asked)
        return await asyncio.shield(asked.outcome)

    async def serve(self) -> None:
        """Do what is asked for, for ever."""
        telling = asyncio.ensure_future(self._tell_again())
        try:
            while True:
                asked = await self._asked.get()
                async with self._at_work:
                    await self._answer(asked)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell_again(self) -> None:
        """An earlier process of this host may have been killed before all had heard that the stages begin again: where
        steps are quick nobody asks, and they would train on for nothing. An old word changes nothing."""
        geneses = self.beginning.geneses
        if geneses[0].era:
            members = [{*genesis.members, *self.followed[int(genesis.stage)].chain.members} for genesis in geneses]
            await tell_all(self.transport, geneses, self.beginning.to_version, members)

    async def _answer(self, asked: _Asked) -> None:
        geneses: list[Genesis] = []
        try:
            if asked.wish.to == NEWEST:
                text = await self.coming_back.go_on_now()
            else:
                made, geneses = await self.carry_out(asked.wish)
                text = f"gone back to version {made.to}; the run goes on as version {geneses[0].version}"
            asked.outcome.set_result(text)
        except (LocalError, RemoteError, SettingsError, TransientError) as error:
            _fail(asked.outcome, error)
        except TimeoutError:
            _fail(asked.outcome, TransientError("it took too long to get the states"))
        finally:
            if not asked.outcome.done():
                _fail(asked.outcome, LocalError("this host has ended meanwhile; look where the run is, and ask again"))
        if geneses:
            stages = [self.progress.present(stage=stage) for stage in range(len(geneses))]
            await tell_all(self.transport, geneses, made.to, stages)

    async def carry_out(self, wish: Wish) -> tuple[Plan, list[Genesis]]:
        """What was done, and the geneses of which the peers are still to be told.

        Raises SettingsError if the wish cannot be granted, TransientError or TimeoutError if the states cannot be had.
        """
        done, first = self.progress.done_versions(), self.progress.first_version
        lately = [notice for notice in self.notices() if notice.step >= max(first, done - RECENT)]
        made = plan(wish, versions=self._versions(), notices=lately, ids_of=self._ids_of)
        order = DataOrder.of_run(self.run.settings)
        async with asyncio.timeout(self.beginning.states_s):
            states, leases, anchored = await self._as_of(made.to)
        try:
            leases = leases.skipping(made.skip, order)
        except ValueError as error:
            raise SettingsError(f"--skip: {error}") from error
        version = await self._unreached()
        starts = [
            await asyncio.to_thread(stage_start, stage, replace(state, version=version, name=UNNAMED))
            for stage, state in enumerate(states)
        ]
        facts: dict[str, Value] = {
            "from": done,
            "to": made.to,
            "version": version,
            "skip": [[start, stop] for start, stop in made.skip],
        }
        geneses: list[Genesis] = []
        await self.archivist.archive_beginning(
            version,
            starts,
            leases,
            anchored=anchored,
            begin=lambda: geneses.extend(self._begin(starts, leases, facts, made.to)),
        )
        spans = order.spans(MicrobatchId(number) for start, stop in made.skip for number in range(start, stop))
        self.emit({"event": "rolled_back", **facts, "tokens": [[*run] for span in spans for run in span.tokens]})
        return made, geneses

    def _versions(self) -> list[int]:
        """Of the present branch, those whose states may still be had."""
        stages, books = range(self.progress.num_stages), self.books()
        anchored = {
            version
            for version in self.justice.anchored_versions(0)
            if all(self.justice.anchor_of(stage, version) is not None for stage in stages)
            and not any(self.progress.is_gone(stage, version, self.run.settings) for stage in stages)
        }
        kept = {read_checkpoint(path).version for path in checkpoints(self.run.folder.checkpoints)}
        return sorted(version for version in anchored | kept if not books.is_abandoned(version))

    def _ids_of(self, step: int) -> set[int]:
        """Microbatches of the step, as stage 0 has certified them."""
        return self.progress.steps[step].ids.get(0, set()) if step in self.progress.steps else set()

    async def _as_of(self, version: int) -> tuple[list[StageState], LeaseTable, bool]:
        """What the stages were at the version, how far the data was used, and whether all of it was anchored: from
        disk, or from peers."""
        path = checkpoint_path(self.run.folder.checkpoints, version)
        starts = self.beginning.stages
        if (path / INFO_FILE).is_file():
            info = read_checkpoint(path)
            read = await asyncio.to_thread(archived, info, self.run.settings)
            record = self.books().checkpoints.get(version)
            return read, leases_of(info), record is not None and CheckpointRecord.from_value(record).anchored
        anchor = self.justice.anchor_of(0, version)
        assert anchor is not None, f"version {version} is anchored or on disk"
        got = [(await self.archivist.state_of(stage, version, start))[0] for stage, start in enumerate(starts)]
        return got, anchor.chain.leases, True

    async def _unreached(self) -> int:
        """A version beyond all that any stage may reach before it hears of the rollback."""

        async def standing(peer: PeerId) -> int:
            try:
                reply = await self.transport.call(peer, STANDING, Message(), timeout_s=STANDING_S, max_body_bytes=0)
                return Fields("standing", reply.meta).integer("version")
            except (TransientError, RemoteError) as error:
                log.info("%s: %s", peer[-6:], error)
                return 0

        training = [peer for peer in self.progress.present() if self.justice.may_train(peer)]
        said = await asyncio.gather(*(standing(peer) for peer in training))
        total = self.run.settings.optimizer.total_steps
        known = max(int(followed.version) for followed in self.followed.values())
        version = highest_said(known, said) + AHEAD
        if version % self.run.settings.checkpoint.every_steps == 0:
            version += 1  # a checkpoint of its own is due there
        if version >= total:
            raise SettingsError(f"the run ends at version {total}: too few steps are left to go on as {version}")
        return version

    def _begin(self, starts: list[StageStart], leases: LeaseTable, facts: dict[str, Value], to: int) -> list[Genesis]:
        """From here on the run is the new branch."""
        members = []
        for stage in range(len(starts)):
            certified, present = self.followed[stage].chain.members, self.progress.present(stage=stage)
            members.append([peer for peer in certified if peer in present and self.justice.may_train(peer)])
            if not members[-1]:
                raise TransientError(f"no member of stage {stage} is present")
        self.run.states, self.run.leases = [start.state for start in starts], leases
        self.run.hashes = [start.offer.hashes for start in starts]
        sources = [StageSource.of_start(start) for start in starts]
        geneses = self.beginning.signed(
            sources, members, leases, known=self.followed.recent_work, era=self.books().lineages[0]
        )
        self.begin(geneses, sources, facts)
        for stage, start in enumerate(starts):
            self.beginning.begin_from(stage, start)
        self.beginning.begun(geneses, to)
        return geneses


def _fail(outcome: asyncio.Future[str], error: Exception) -> None:
    log.warning("not rolled back: %s", error)
    outcome.set_exception(error)
    outcome.exception()  # whoever asked may be gone: that it was not looked at is no fault
