"""Windows in a running swarm: inner steps by itself, one round for many, and faults in the middle of them."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from peer.round.mail.mail import ROUND
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.averaging.parts import Parts
from swarm.core.ids import PeerId, Step
from swarm.model.stack import stage_layout
from swarm.network.transport import Message, TransportAround
from swarm.optim.carried_moments import CARRIED
from tests.peer.stage.state_digests import StateDigests
from tests.swarm_in_process import InProcessSwarm, SwarmPeer, identity_of, manifest_of, prepare, swarm_in_process
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

LOCAL_STEPS = 6
PARTS_S = 0.3


def windows(**tables: dict[str, Any]) -> str:
    """A run of one stage in which each peer takes six inner steps of two microbatches between two rounds."""
    named: dict[str, dict[str, Any]] = {
        "model": {"stages": 1},
        "batch": {"microbatch_size": 2, "target_tokens": 64},
        "codecs": {"averaging": "int2"},
        "averaging": {"local_steps": LOCAL_STEPS},
        "optimizer": {"total_steps": 4},
        "checkpoint": {"every_steps": 4, "snapshot_every": 4},
    }
    return manifest_of(**named | tables)


class LongParts(TransportAround):
    """What carries parts of a round takes its time: the round ends long after the next window could begin."""

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == ROUND and request.meta.get("kind") == "parts":
            await asyncio.sleep(PARTS_S)
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


class Watched:
    """What each peer had at each version, and how much it brought to it."""

    def __init__(self) -> None:
        self.digests = StateDigests()
        self.entries: dict[int, dict[PeerId, int]] = {}
        self.sent: dict[int, list[int]] = defaultdict(list)
        """Bytes that members sent in a round, by the version that it started from."""
        self.begun_before: dict[int, int] = {}
        """Of each step, how many entries were computed before the version that it is on was there."""

    def applied(self, steps: StageSteps, applied: Applied) -> None:
        version = int(applied.chain.version)
        self.digests.applied(steps, applied)
        made = applied.result.roster.contributions
        self.entries[version - 1] = {one.peer_id: len(one.work) for one in made}
        self.sent[version - 1].append(applied.sent_bytes)
        self.begun_before[version - 1] = sum(work.version < version - 1 for one in made for work in one.work)


def test_replicas_are_equal_after_each_round_and_the_model_learns(tmp_path: Path) -> None:
    watched = Watched()

    async def train() -> tuple[InProcessSwarm, dict[str, Any]]:
        async with swarm_in_process(windows(), tmp_path, peers=(3,)) as swarm:
            swarm.on_applied.append(watched.applied)
            return swarm, await swarm.finished()

    swarm, report = asyncio.run(train())
    assert report["steps"] == 4
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"] - 0.2
    assert all(len(digests) == 1 for digests in watched.digests.values()), watched.digests
    assert max(max(of.values()) for of in watched.entries.values()) == 2 * LOCAL_STEPS
    assert report["tokens"] == 32 * sum(sum(of.values()) for of in watched.entries.values())
    state = swarm.of_stage(0)[0].steps.replica.state
    values, encoded = state.weights.size, state.moments[CARRIED]
    assert len(encoded) < 0.45 * values, "who joins needs the weights, these few bytes of moments, and nothing else"
    assert encoded.any()
    assert state.scalars["beta1_power"] == pytest.approx(0.9 ** (4 * LOCAL_STEPS))


def test_a_window_goes_on_while_the_round_of_the_one_before_does(tmp_path: Path) -> None:
    watched = Watched()
    tables: dict[str, Any] = {"averaging": {"local_steps": LOCAL_STEPS, "delay": 1, "sync_steps": 2}}
    tables["optimizer"] = {"total_steps": 400}

    def beside() -> list[int]:
        """Steps whose windows could begin while a round sent something: who founds the run takes some alone."""
        return [step for step in sorted(watched.entries) if step >= 2 and len(watched.entries[step - 1]) == 3]

    async def train() -> None:
        async with swarm_in_process(
            windows(**tables), tmp_path, peers=(3,), wrap=lambda stage, index, inner: LongParts(inner)
        ) as swarm:
            swarm.on_applied.append(watched.applied)
            await swarm.until(lambda: len(beside()) >= 3)

    asyncio.run(train())
    assert all(len(digests) == 1 for digests in watched.digests.values()), watched.digests
    assert [watched.begun_before[step] for step in range(2)] == [0, 0], "these wait for their rounds"
    assert all(watched.begun_before[step] for step in beside()), (beside(), dict(watched.begun_before))
    assert max(num for of in watched.entries.values() for num in of.values()) == 2 * LOCAL_STEPS


@pytest.mark.parametrize("delay", [0, 1])
def test_who_dies_in_a_window_costs_its_own_and_who_comes_begins_with_the_next(delay: int, tmp_path: Path) -> None:
    watched = Watched()

    async def train() -> None:
        tables: dict[str, Any] = {"optimizer": {"total_steps": 400}, "limits": {"founders_per_stage": 3}}
        tables["averaging"] = {"local_steps": LOCAL_STEPS, "delay": delay, "sync_steps": 0}
        tables["checkpoint"] = {"every_steps": 400, "snapshot_every": 4}
        async with swarm_in_process(windows(**tables), tmp_path, peers=(3,)) as swarm:
            swarm.on_applied.append(watched.applied)
            await swarm.until_version(1)
            victim = swarm.of_stage(0)[1]
            await swarm.kill(victim)
            newcomer = await swarm.add_peer(0)
            comes = newcomer.peer_id
            await swarm.until(lambda: any(comes in of for of in watched.entries.values()))
            last = watched.entries[max(watched.entries)]
            assert victim.peer_id not in last
            assert last[comes] <= 2 * LOCAL_STEPS

    asyncio.run(train())
    assert all(len(digests) == 1 for digests in watched.digests.values())


@pytest.mark.soak
@pytest.mark.parametrize("delay", [0, 1])
def test_a_line_that_breaks_in_a_window_costs_that_window_and_its_owner_comes_back(delay: int, tmp_path: Path) -> None:
    watched = Watched()
    deadlines = {"call_s": 1.0, "hop_s": 5.0, "step_s": 5.0, "straggler_s": 0.3, "lease_s": 1.5}

    async def train() -> tuple[PeerId, int, int]:
        tables: dict[str, Any] = {"optimizer": {"total_steps": 4000}, "limits": {"founders_per_stage": 3}}
        tables |= {"checkpoint": {"every_steps": 4000, "snapshot_every": 4}, "deadlines": deadlines}
        tables["averaging"] = {"local_steps": LOCAL_STEPS, "delay": delay, "sync_steps": 0}
        async with swarm_in_process(windows(**tables), tmp_path, peers=(3,)) as swarm:
            swarm.on_applied.append(watched.applied)
            await swarm.until_version(2)
            victim = swarm.of_stage(0)[1]
            at = await until_inside_a_window(victim)
            swarm.network.break_line(victim.peer_id)
            await swarm.until_version(at + 3)
            swarm.network.mend_line(victim.peer_id)
            healed = swarm.host.progress.done_versions()
            await swarm.until(lambda: any(victim.peer_id in watched.entries[v] for v in watched.entries if v > healed))
            return victim.peer_id, at, healed

    cut_off, at, healed = asyncio.run(train())
    lost = [version for version in range(at, healed) if cut_off not in watched.entries[version]]
    assert len(lost) >= 2, "its line was broken for three windows, of which it may have brought one"
    full = 2 * LOCAL_STEPS
    for version in range(at, healed):
        others = {peer: num for peer, num in watched.entries[version].items() if peer != cut_off}
        assert set(others.values()) == {full}, f"version {version}: {others}"
    assert all(len(digests) == 1 for digests in watched.digests.values())


async def until_inside_a_window(member: SwarmPeer) -> int:
    """Until it has taken some of its inner steps, and not all; the version whose window it is."""
    async with asyncio.timeout(120.0):
        while True:
            version = member.steps.version
            if 2 < member.steps.replica.num_done(Step(version)) < 2 * LOCAL_STEPS - 2:
                return int(version)
            await asyncio.sleep(0)


WINDOWS, INNER_STEPS = 16, 10
SLOW_S = 300.0


@pytest.mark.soak
def test_four_strangers_learn_more_than_one_alone_with_as_many_tokens_each(tmp_path: Path) -> None:
    """Though one of them dies in a window and another comes; alone is plain AdamW."""
    watched = Watched()
    alone: dict[str, Any] = {
        "averaging": {"local_steps": 1},
        "codecs": {"averaging": "fp32"},
        "optimizer": {"total_steps": WINDOWS * INNER_STEPS},
    }
    together: dict[str, Any] = {
        "run": {"trust": "public"},
        "averaging": {"local_steps": INNER_STEPS},
        "optimizer": {"total_steps": WINDOWS},
        "audits": {"agreements_to_promote": 0},
        "limits": {"founders_per_stage": 4},
    }
    rare = {"every_steps": 160, "snapshot_every": 4}

    async def train_one() -> dict[str, Any]:
        folder = tmp_path / "alone"
        async with swarm_in_process(windows(**alone, checkpoint=rare), folder, peers=(1,)) as swarm:
            return await swarm.finished(timeout_s=SLOW_S)

    async def train() -> dict[str, Any]:
        folder = tmp_path / "together"
        async with swarm_in_process(windows(**together, checkpoint=rare), folder, peers=(4,)) as swarm:
            swarm.on_applied.append(watched.applied)
            await swarm.until_version(5, timeout_s=SLOW_S)
            await swarm.kill(swarm.of_stage(0)[1])
            await swarm.add_peer(0)
            return await swarm.finished(timeout_s=SLOW_S)

    one, four = asyncio.run(train_one()), asyncio.run(train())
    assert four["held_out_loss"]["end"] < one["held_out_loss"]["end"] - 0.05, (one["held_out_loss"], four)
    assert all(len(digests) == 1 for digests in watched.digests.values())
    settings = prepare(windows(**together), tmp_path / "layout").settings
    layout = stage_layout(settings.model, 0)
    each = sum(watched.sent[1]) / 4  # three quarters of a contribution and of a result
    assert each == pytest.approx(1.5 * Parts.of(settings, layout).all_result_bytes, rel=0.02)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("attack", "compute_dtype"),
    [
        *(
            (f"{kind}@2", "fp32")
            for kind in (
                "small_moments",
                "negated_moments",
                "partial_work",
                "sign_flip",
                "stale_weights",
                "copied_gradient",
                "other_data",
                "bent_layer",
                "lazy_window_10",
                "lazy_window_20",
                "lazy_window_30",
                "lazy_window_50",
                "lazy_window_90",
            )
        ),
        *((f"{kind}@2", "bf16") for kind in ("small_moments", "stale_weights", "lazy_window_20")),
    ],
)
def test_a_liar_whose_window_is_replayed_is_put_out(tmp_path: Path, attack: str, compute_dtype: str) -> None:
    watched, steps = Watched(), 48
    tables: dict[str, Any] = {
        "run": {"trust": "public"},
        "model": {"stages": 1, "compute_dtype": compute_dtype},
        "audits": {"contribution_budget": 8.0},
        "limits": {"founders_per_stage": 3},
        "optimizer": {"total_steps": steps},
    }

    def banned(swarm: InProcessSwarm) -> list[dict[str, Any]]:
        return [event for event in swarm.events if event["event"] == "banned"]

    async def train() -> InProcessSwarm:
        async with swarm_in_process(windows(**tables), tmp_path, peers=(3,), attacks={(0, 2): attack}) as swarm:
            swarm.on_applied.append(watched.applied)
            await swarm.until(lambda: swarm.has_ended() or bool(banned(swarm)), timeout_s=120.0)
            await swarm.until_version(min(swarm.host.progress.done_versions() + 2, steps), timeout_s=60.0)
            return swarm

    swarm = asyncio.run(train())
    liar = identity_of(2).peer_id
    (ban,) = banned(swarm)
    assert ban["peer_id"] == liar
    verdict = judge(evidence_in(Path(ban["evidence"])), run_key=swarm.run.run_key.peer_id)
    assert verdict.guilty
    assert verdict.accused == liar
    assert all(len(digests) == 1 for digests in watched.digests.values())
