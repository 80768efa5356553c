"""This is where the host has a run go on from an earlier state, without some data: what its owner asks for.

The abandoned versions keep their numbers and names; the run goes on under a number that no stage has reached, with
geneses of a new era. So nothing that was signed in the one branch can be taken for something of the other, no audit's
draw is known beforehand, and a peer that hears of it late is behind, as any other that was away.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bootstrap.archivist import Archivist
from bootstrap.beginning import Beginning, StageStart, stage_start
from bootstrap.books import Books
from bootstrap.following import Following
from bootstrap.justice import Justice
from bootstrap.ledger import Ledger
from bootstrap.progress import RunProgress
from bootstrap.run_folder import PreparedRun, leases_of
from bootstrap.trouble import Notice
from swarm.checkpoint.archive import INFO_FILE, checkpoint_path, checkpoints, load_stage, read_checkpoint
from swarm.checkpoint.record import CheckpointRecord
from swarm.checkpoint.state import StageState
from swarm.core.canonical import Value
from swarm.core.data_order import DataOrder
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.leases import LeaseTable
from swarm.core.stage_chain import Genesis
from swarm.host_protocol import ROLLBACK, STANDING
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

Range = tuple[int, int]
"""Ids of microbatches, [start, stop)."""

ASKED, ANSWERED = "rollback_asked", "rollback_answered"
"""Events of the ledger, by which `swarm rollback` and the host talk."""
RECENT = 64
"""Steps back, in which what was noticed is taken for the trouble that the run is rolled back for."""
AHEAD = 8
"""Versions beyond the highest that is known: what the stages may reach before they hear of the rollback."""
MOST_SKIPPED = 1 << 20
"""Microbatches, in one rollback."""
TELL_FOR_S, TELL_AGAIN_S, TELL_S = 60.0, 1.0, 5.0


@dataclass(frozen=True)
class Wish:
    """What the owner asks for."""

    to: int | None
    """The version to go back to; None: the last that all stages have anchored before the trouble."""
    skip: tuple[Range, ...] | None
    """Microbatches that nobody is to take again; None: those of the steps that went wrong, and of the one before."""

    def to_facts(self) -> dict[str, Value]:
        skip: Value = None if self.skip is None else [[start, stop] for start, stop in self.skip]
        return {"to": self.to, "skip": skip}

    @classmethod
    def from_facts(cls, facts: Any) -> "Wish":
        skip = facts["skip"]
        return cls(facts["to"], None if skip is None else tuple((start, stop) for start, stop in skip))


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
    known = [notice for notice in notices if notice.kind != "stalled"]
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


@dataclass(frozen=True, kw_only=True)
class RollingBack:
    """Takes the owner's wishes from the ledger, and carries them out."""

    run: PreparedRun
    transport: Transport
    ledger: Ledger
    progress: RunProgress
    justice: Justice
    followed: Following
    archivist: Archivist
    beginning: Beginning
    books: Callable[[], Books]
    """As of now."""
    notices: Callable[[], Iterable[Notice]]
    begin: Callable[[list[Genesis], Value], None]
    """Told the new geneses, and why they are: they count from then on."""
    emit: Callable[[dict[str, Any]], None]

    async def serve(self) -> None:
        """Do what is asked for in time, for ever."""
        seen = 0
        while True:
            last = self.books().num_events
            for event in list(self.ledger.events(ASKED, after=seen)):
                facts: Any = event.facts
                if facts["until"] > time.time() and event.number not in self._done():
                    await self._answer(event.number, Wish.from_facts(facts["wish"]))
            seen = last
            await asyncio.sleep(1.0)

    def _done(self) -> set[int]:
        """Numbers of the wishes that this host, or an earlier process of it, has granted or refused."""
        done: list[Any] = [event.facts for event in self.ledger.events(ANSWERED, "rollback")]
        return {facts["asked"] for facts in done}

    async def _answer(self, number: int, wish: Wish) -> None:
        geneses: list[Genesis] = []
        try:
            made, geneses = await self.carry_out(wish, asked=number)
            done, text = True, f"gone back to version {made.to}; the run goes on as version {geneses[0].version}"
        except (LocalError, RemoteError, SettingsError, TransientError, TimeoutError) as error:
            done, text = False, str(error) or "it took too long to get the states"
            log.warning("not rolled back: %s", text)
        self.ledger.append(ANSWERED, {"asked": number, "done": done, "text": text})
        if done:
            await self._tell_all(geneses, made.to)

    async def carry_out(self, wish: Wish, *, asked: int) -> tuple[Plan, list[Genesis]]:
        """What was done, and the geneses of which the peers are still to be told.

        Raises SettingsError if the wish cannot be granted, TransientError or TimeoutError if the states cannot be had.
        """
        if not self.beginning.made.is_set():
            raise SettingsError("the run has not begun: there is nothing to go back from")
        done, first = self.progress.done_versions(), self.progress.first_version
        lately = [notice for notice in self.notices() if notice.step >= max(first, done - RECENT)]
        made = plan(wish, versions=self._versions(), notices=lately, ids_of=self._ids_of)
        order = DataOrder.of_run(self.run.settings)
        async with asyncio.timeout(self.run.settings.deadlines.state_transfer_s):
            states, leases, anchored = await self._as_of(made.to)
        try:
            leases = leases.skipping(made.skip, order)
        except ValueError as error:
            raise SettingsError(f"--skip: {error}") from error
        version = await self._unreached()
        starts = [
            await asyncio.to_thread(stage_start, stage, replace(state, version=version))
            for stage, state in enumerate(states)
        ]
        facts: dict[str, Value] = {
            "asked": asked,
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
            begin=lambda: geneses.extend(self._begin(starts, leases, facts)),
        )
        spans = order.spans(MicrobatchId(number) for start, stop in made.skip for number in range(start, stop))
        self.emit({"event": "rolled_back", **facts, "tokens": [[span.first_token, span.stop_token] for span in spans]})
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
            layouts = [start.state.layout for start in starts]
            read = [await asyncio.to_thread(load_stage, info, stage, layout) for stage, layout in enumerate(layouts)]
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
                reply = await self.transport.call(peer, STANDING, Message(), timeout_s=TELL_S, max_body_bytes=0)
                return Fields("standing", reply.meta).integer("version")
            except (TransientError, RemoteError) as error:
                log.info("%s: %s", peer[-6:], error)
                return 0

        training = [peer for peer in self.progress.present() if self.justice.may_train(peer)]
        said = await asyncio.gather(*(standing(peer) for peer in training))
        total = self.run.settings.optimizer.total_steps
        highest = max([int(followed.version) for followed in self.followed.values()])
        version = max([highest, *(number for number in said if number <= total)]) + AHEAD
        if version % self.run.settings.checkpoint.every_steps == 0:
            version += 1  # a checkpoint of its own is due there
        if version >= total:
            raise SettingsError(f"the run ends at version {total}: too few steps are left to go on as {version}")
        return version

    def _begin(self, starts: list[StageStart], leases: LeaseTable, facts: dict[str, Value]) -> list[Genesis]:
        """From here on the run is the new branch."""
        members = []
        for stage in range(len(starts)):
            certified, present = self.followed[stage].chain.members, self.progress.present(stage=stage)
            members.append([peer for peer in certified if peer in present and self.justice.may_train(peer)])
            if not members[-1]:
                raise TransientError(f"no member of stage {stage} is present")
        self.run.states, self.run.leases = [start.state for start in starts], leases
        geneses = self.beginning.begin_again(starts, members, era=self.books().lineages[0])
        self.begin(geneses, facts)
        return geneses

    async def _tell_all(self, geneses: list[Genesis], to: int) -> None:
        """Each peer that is there, until it has heard; the others will find themselves behind."""
        give_up_at = time.monotonic() + TELL_FOR_S

        async def tell(peer: PeerId, genesis: Genesis) -> None:
            beside: list[Value] = [one.to_value() for one in geneses if abs(one.stage - genesis.stage) == 1]
            meta: dict[str, Value] = {"genesis": genesis.to_value(), "to_version": to, "beside": beside}
            while time.monotonic() < give_up_at and peer in self.progress.present(stage=int(genesis.stage)):
                try:
                    await self.transport.call(peer, ROLLBACK, Message(meta), timeout_s=TELL_S, max_body_bytes=0)
                    return
                except (TransientError, RemoteError) as error:
                    log.info("%s has not heard of the rollback: %s", peer[-6:], error)
                    await asyncio.sleep(TELL_AGAIN_S)

        told = [(peer, genesis) for genesis in geneses for peer in self.progress.present(stage=int(genesis.stage))]
        await asyncio.gather(*(tell(peer, genesis) for peer, genesis in told))
