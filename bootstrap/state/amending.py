"""How the host amends its run: it has the era end at a version, and begins another under other settings.

First the run key names the version ahead (`Ending`): whoever has heard takes no step beyond, so with a quorum told no
stage does. Where one had gone too far already, a later version is named. Once all stages stand there and their states
are archived, the run key signs the `Amendment`, and this host takes its run up as if it were started again: under the
new settings, with its peers to come in anew. What they have on their disks they need not fetch.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bootstrap.owner.progress import RECENT_STEPS
from bootstrap.owner.worth import worth_of
from bootstrap.program.host_context import HostContext
from bootstrap.round.asking import of_each
from bootstrap.state.run_folder import check_stage_sizes
from swarm.checkpoint.archive import INFO_FILE, checkpoint_path
from swarm.core.canonical import Value
from swarm.core.errors import SettingsError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Version
from swarm.core.settings import RunSettings
from swarm.core.state.coming_back import highest_said
from swarm.host_protocol import ENDING, STANDING
from swarm.manifest.amendment import CUT, Changes, amended, packed_changes, read_changes, told, unpacked_changes
from swarm.manifest.signed_run import MAX_AMENDMENTS, NOTHING_BEFORE, Amendment, Ending
from swarm.network.transport import Message

log = logging.getLogger(__name__)

TELL_EVERY_S, TELL_S = 2.0, 5.0
HEARD_AFTER_S = 15.0
"""By then all who are there have heard that the era ends."""
FEWEST_AHEAD = 4
"""Versions from the highest that is known to where the era ends, where steps take longer than that."""
SOONEST = "soonest"


@dataclass(frozen=True)
class Wish:
    """What the owner asks for, found to be possible."""

    changes: Changes
    settings: RunSettings
    """With the changes."""
    at: int
    """The version at which they come into force."""


@dataclass(kw_only=True)
class Amending:
    """Carries out one amendment after another."""

    host: HostContext
    is_over: Callable[[], bool]
    """Whether the run has ended, and nobody trains any more."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """An amendment is in force: this host is to take its run up anew."""

    def __post_init__(self) -> None:
        if self.pending is not None:
            self.host.followed.end_at(self.ends_at)

    @property
    def pending(self) -> Ending | None:
        """What has been asked for and is not in force yet."""
        held = self.host.books().ending
        return None if held is None else Ending.from_value(held)

    @property
    def ends_at(self) -> int:
        """The version at which the present era ends: the run's last, or that at which it is to be amended."""
        pending, total = self.pending, self.host.run.settings.optimizer.total_steps
        return total if pending is None else min(total, int(pending.version))

    @property
    def waits_for(self) -> str:
        """What is to be amended, in words; empty if nothing is."""
        pending = self.pending
        if pending is None:
            return ""
        lines = told(self.host.run.settings, unpacked_changes(pending.changes))
        return f"it is amended at version {self.ends_at}: {'; '.join(lines)}"

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was amended so far, for people: from which version on, and what."""
        run = self.host.run.signed
        return [
            {"version": int(one.version), "changes": told(run.under(one.number - 1).in_force, one.changed)}
            for one in run.amendments
        ]

    # -- what the owner asks --------------------------------------------------------------------------------

    async def offer(self, texts: Sequence[str], at: str) -> list[str]:
        """What would change, for the owner to agree to. Raises SettingsError for what cannot be done."""
        wish = await self._wish(texts, at)
        lines = told(self.host.run.settings, wish.changes)
        lines.append(f"from version {wish.at} on, the stages begin there anew; weights, moments and credit stay")
        if CUT in wish.changes:
            lines.append("the stages are cut anew: peers are spread over them as they join again, and fetch their part")
        return [*lines, *await asyncio.to_thread(worth_of, wish.settings)]

    async def ask(self, texts: Sequence[str], at: str) -> str:
        """What is done about it. Raises SettingsError for what cannot be done."""
        wish = await self._wish(texts, at)
        if self.is_over():
            self._put_in_force(wish.changes, wish.at)
            return f"the run goes on from version {wish.at} as soon as its peers join again"
        heard = await self._tell(self._end(wish.changes, wish.at))
        return f"the run is amended at version {self.ends_at}; {heard} of {len(self._training())} peers have heard it"

    async def _wish(self, texts: Sequence[str], at: str) -> Wish:
        host = self.host
        settings = host.run.settings
        changes = await asyncio.to_thread(read_changes, texts, settings)
        made = await asyncio.to_thread(amended, settings, changes)
        await asyncio.to_thread(check_stage_sizes, made)
        if not host.beginning.made.is_set() and not self.is_over():
            raise SettingsError("the stages have not begun: amend the run once it goes on")
        if self.pending is not None:
            raise SettingsError(f"the run is being amended already, at version {self.ends_at}: ask again after that")
        if len(host.run.signed.amendments) >= MAX_AMENDMENTS:
            raise SettingsError(f"the run was amended {MAX_AMENDMENTS} times, which is the most")
        version = await self._version(at)
        if made.optimizer.total_steps <= version:
            raise SettingsError(
                f"optimizer.total_steps = {made.optimizer.total_steps} is not beyond version {version}, at which the "
                "amendment comes into force; give more steps, or an earlier --at"
            )
        return Wish(changes, made, version)

    async def _version(self, at: str) -> int:
        """Where the era is to end. Raises SettingsError for another than can be."""
        total = self.host.run.settings.optimizer.total_steps
        if self.is_over():
            if at not in (SOONEST, str(total)):
                raise SettingsError(f"--at {at}: the run is over, at version {total}; leave --at out")
            if not (checkpoint_path(self.host.run.folder.checkpoints, total) / INFO_FILE).is_file():
                raise SettingsError(f"the run is over, and its last checkpoint, {total}, is not here any more")
            return total
        highest = await self._highest()
        soonest = min(total, highest + self._ahead())
        if at == SOONEST:
            return soonest
        if not at.isdecimal() or len(at) > 18:
            raise SettingsError(f"--at {at}: give a version, such as {soonest}, or {SOONEST}")
        if not highest + 1 < int(at) <= total:
            raise SettingsError(
                f"--at {at}: the stages are at version {highest}, and the run ends at {total}; give {soonest} or later"
            )
        return int(at)

    # -- the era's end ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell all who train that the era ends, again and again, for ever."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            pending = self.pending
            if pending is not None:
                await self._tell(pending)

    def carry_out(self) -> None:
        """All stages stand at the era's end, and their states are archived: the amendment is in force."""
        pending = self.pending
        assert pending is not None
        self._put_in_force(unpacked_changes(pending.changes), int(pending.version))

    def _put_in_force(self, changes: Changes, version: int) -> None:
        run = self.host.run
        before = run.signed.amendments
        previous = before[-1].name if before else NOTHING_BEFORE
        made = Amendment(run.run_id, len(before) + 1, previous, Version(version), packed_changes(changes))
        self.host.ledger.append("amendment", made.signed_by(run.run_key).to_value(), once=f"amendment {made.number}")
        said: dict[str, Any] = {"event": "amended", "version": version, "changes": told(run.settings, changes)}
        self.host.emit(said)
        self.done.set()

    def _end(self, changes: Changes, version: int) -> Ending:
        run = self.host.run
        made = Ending(run.run_id, self._era, Version(version), packed_changes(changes)).signed_by(run.run_key)
        self.host.ledger.append("ending", made.to_value())
        self.host.followed.end_at(version)
        self.host.emit({"event": "amending", "version": version, "changes": told(run.settings, changes)})
        return made

    @property
    def _era(self) -> int:
        return self.host.beginning.geneses[0].era

    async def _tell(self, pending: Ending) -> int:
        """How many have heard; and name a later end where some have gone too far, or the stages have begun again."""
        meta: dict[str, Value] = {"ending": pending.to_value()}

        async def one(peer: PeerId) -> bool:
            reply = await self.host.transport.call(peer, ENDING, Message(meta), timeout_s=TELL_S, max_body_bytes=0)
            fields = Fields("ending answer", reply.meta)
            self.host.progress.has_answered(peer)
            if fields.optional("digest"):  # an earlier process of this host may have been told
                stage = self.host.progress.peers[peer].stage
                held = self.host.progress.digests[int(pending.version)][stage]
                held[peer] = fields.octets("digest", length=32).hex()
            return fields.boolean("in_time")

        said = await of_each(self._training(), one) if pending.era == self._era else {}
        total = self.host.run.settings.optimizer.total_steps
        if pending.era != self._era or (pending.version < total and self._is_late(pending, said)):
            version = min(total, max(int(pending.version), await self._highest()) + self._ahead())
            log.warning("the era does not end at version %d but at %d: some had gone too far", pending.version, version)
            self._end(unpacked_changes(pending.changes), version)
        return len(said)

    def _is_late(self, pending: Ending, in_time: Mapping[PeerId, bool]) -> bool:
        """Whether a stage is certified beyond the end, or none of its members that answered has its state there."""
        for followed in self.host.followed.values():
            said = [in_time[peer] for peer in followed.chain.members if peer in in_time]
            if followed.version > pending.version or (said and not any(said)):
                return True
        return False

    def _training(self) -> list[PeerId]:
        """Who is there as far as is known, and the members: of those who stand still nothing is heard."""
        known = self.host.progress.peers
        members = {peer for followed in self.host.followed.values() for peer in followed.chain.members}
        there = {*self.host.progress.present(), *(peer for peer in members if peer in known)}
        return sorted(peer for peer in there if self.host.justice.may_train(peer))

    async def _highest(self) -> int:
        """The highest version that is certified of any stage, or not much more, where somebody says so."""

        async def one(peer: PeerId) -> int:
            reply = await self.host.transport.call(peer, STANDING, Message(), timeout_s=TELL_S, max_body_bytes=0)
            return Fields("standing", reply.meta).integer("version")

        said: Mapping[PeerId, int] = await of_each(self._training(), one)
        known = max(int(followed.version) for followed in self.host.followed.values())
        return highest_said(known, said.values())

    def _ahead(self) -> int:
        """Steps that are not taken before all have heard."""
        steps = self.host.progress.steps
        ends = sorted(at for number in steps if (at := steps[number].finished_at) is not None)[-RECENT_STEPS:]
        each_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else math.inf
        return FEWEST_AHEAD + (math.ceil(HEARD_AFTER_S / each_s) if each_s > 0 else 0)
