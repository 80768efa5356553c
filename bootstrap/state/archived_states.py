"""The states that the host itself can give: of its checkpoints, of the run's beginning, and those handed over to it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bootstrap.state.run_folder import PreparedRun, leases_of
from swarm.averaging.parts import Parts
from swarm.checkpoint.archive import checkpoints, load_stage, read_checkpoint
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.results import ResultStore
from swarm.checkpoint.snapshots import SnapshotStore
from swarm.checkpoint.state import Bytes, StageState
from swarm.checkpoint.transfer import bodies_of, fetch_parts, fetch_results, fetch_state, parts_of
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.round.contribution import Result
from swarm.core.state.coming_back import Era, Point, point_of, points_of
from swarm.core.state.stage_chain import StageChain
from swarm.disk.cold_bytes import ColdBytes
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Transport


@dataclass(frozen=True)
class Archived:
    """A state of one stage that is on this host's disk, or in its memory."""

    load: Callable[[ParameterLayout], StageState]
    """Raises TransientError when it is gone, or broken."""
    leases: Callable[[], LeaseTable]
    """How far the data was used; it matters at stage 0 only."""


class ArchivedStates:
    """What the host holds of the run, stage by stage."""

    def __init__(self, run: PreparedRun) -> None:
        self._run = run
        folder = run.folder.root / "handed-over"
        self._handed = [
            KeptPast(folder / f"stage-{stage}", StageIndex(stage), run.settings, state.layout)
            for stage, state in enumerate(run.states)
        ]
        self._stores = [SnapshotStore(past.folder, kept=1) for past in self._handed]
        self._chunks: list[dict[bytes, memoryview]] = [{} for _ in run.states]
        self._parts: list[dict[bytes, Bytes]] = [{} for _ in run.states]
        """Of each stage, what came of a state, and of results, that did not come whole."""
        self._taking = [asyncio.Lock() for _ in run.states]
        """Of a stage's last peers two may leave at once."""

    async def take(self, transport: Transport, peer: PeerId, stage: int, certified: StageChain, *, start: int) -> None:
        """Fetch a peer's snapshot of version `start` and the results from there to what is `certified`.

        On disk when this returns; what was there before is gone only then. Raises TransientError, or RemoteError for
        what does not lead to the certified version.
        """
        past, settings, version = self._handed[stage], self._run.settings, int(certified.version)
        async with self._taking[stage]:
            state, offer = await fetch_state(
                transport, peer, stage, past.layout, settings, past.folder, version=start, held=self._chunks[stage]
            )
            if offer.chain is None:
                raise RemoteError("protocol", f"version {start} comes without what is certified of it", peer)
            if await self._led_to(transport, peer, offer.chain, version) != certified.to_value():
                raise RemoteError("fork", f"version {start} does not lead to the certified version {version}", peer)
            await self._stores[stage].save(state, offer.chain)
            results = ResultStore(past.folder, offer.chain, kept=version - start + 1)
            at = start
            while at < version:
                offered = await fetch_results(transport, peer, at, settings)
                if not offered.results:
                    raise TransientError(f"{peer} has no result of step {at} any more")
                for result in offered.results[: version - at]:
                    if int(result.roster.step) != at:
                        raise RemoteError("protocol", f"the result of step {result.roster.step} for {at}", peer)
                    results.keep(result, await self._bodies(transport, peer, stage, result))
                    await asyncio.to_thread(results.write, at)
                    at += 1
            await asyncio.to_thread(results.forget_others)
            self._chunks[stage].clear()
            self._parts[stage].clear()

    async def _bodies(self, transport: Transport, peer: PeerId, stage: int, result: Result) -> list[Bytes]:
        """Its parts, one by one. Raises TransientError or RemoteError."""
        past, settings = self._handed[stage], self._run.settings
        parts, held = Parts.of(settings, past.layout), self._parts[stage]
        if len(result.parts) != len(parts):
            raise RemoteError("protocol", f"a result of {len(result.parts)} parts, where there are {len(parts)}", peer)
        largest_bytes = max(map(parts.result_bytes, range(len(parts))))
        step, named, keep = result.roster.step, parts_of(result), ColdBytes(past.folder, "parts").put
        await fetch_parts(transport, [peer], step, named, settings, held, largest_bytes=largest_bytes, keep=keep)
        return bodies_of(result, held)

    async def _led_to(self, transport: Transport, peer: PeerId, chain: StageChain, version: int) -> Value:
        """What the chain becomes by the peer's results, up to a version: its name alone would bind no leases.

        Raises TransientError or RemoteError.
        """
        settings = self._run.settings
        while chain.version < version:
            offered = await fetch_results(transport, peer, int(chain.version), settings)
            if not offered.results:
                raise TransientError(f"{peer} has no result of step {chain.version} any more")
            for result in offered.results[: version - int(chain.version)]:
                chain = chain.advance(result, settings)
        return chain.to_value()

    def held(self, stage: int, eras: Sequence[Era]) -> dict[Point, Archived]:
        """Of one stage, by what it is a state of."""
        found: dict[Point, Archived] = {}
        run, past = self._run, self._handed[stage]
        begun, leases = run.states[stage], run.leases
        point = point_of(begun.version, eras)
        if point is not None:
            found[point] = Archived(lambda layout: begun, lambda: leases)
        for path in checkpoints(run.folder.checkpoints):
            info = read_checkpoint(path)
            point = point_of(info.version, eras)
            if point is not None and info.meta.model.stage_layers == run.settings.model.stage_layers:
                found[point] = Archived(partial(load_stage, info, stage), partial(leases_of, info))
        holdings = past.holdings()
        newest = max((one.newest for one in holdings), default=0)
        for given, holding in points_of(holdings, eras, stage, newest=newest).items():
            by = past, holding.lineage, holding.newest
            found[given] = Archived(partial(_made_again, *by), partial(_leases_at, *by))
        return found


def _made_again(past: KeptPast, lineage: bytes, version: int, layout: ParameterLayout) -> StageState:
    made = past.made_again(lineage, version)
    if made is None:
        raise TransientError(f"version {version} that was handed over is broken on this disk")
    return made[0]


def _leases_at(past: KeptPast, lineage: bytes, version: int) -> LeaseTable:
    chain = past.chain_at(lineage, version)
    if chain is None:
        raise TransientError(f"version {version} that was handed over is broken on this disk")
    return chain.leases
