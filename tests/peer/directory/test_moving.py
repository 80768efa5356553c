"""A swarm that starts uneven becomes even by itself, among strangers too: peers go where they are needed, and stay."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.directory import rebalancing
from bootstrap.program.ledger import Ledger
from swarm.core.directory import evening
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.host_protocol import REPORT, StepReport
from swarm.model.stage import StageModel
from swarm.network.transport import Message, Transport, TransportAround
from tests.branches import Branches
from tests.process_swarm import ProcessSwarm, Zygote
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process
from tests.verification.histories import end_with_one_history

SETTLES, SLOW_S = 2, 0.02


class SpeedLiar(TransportAround):
    """It says that it takes a tenth of the time, and its neighbours ten times theirs."""

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == REPORT:
            report = StepReport.from_value(Fields("report", request.meta).message("report"))
            boast = replace(report, answered_s=report.answered_s / 10, waited_s=report.waited_s * 10)
            request = Message({"report": boast.to_value()})
        return await super().call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


def liar(stage: int, index: int, transport: Transport) -> Transport:
    """The one of the last stage, and one of the first."""
    return SpeedLiar(transport) if (stage, index) in ((0, 1), (1, 0)) else transport


def stages(swarm: InProcessSwarm) -> list[int]:
    """How many members each stage has, as it is certified."""
    chains = [peer.daemon.at.steps.chain for peer in swarm.peers if peer.daemon.at is not None]
    return [max((len(chain.members) for chain in chains if chain.stage == stage), default=0) for stage in range(2)]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer as if on a machine of its own, and a host that looks soon."""
    for module in (evening, rebalancing):
        monkeypatch.setattr(module, "SETTLES_VERSIONS", SETTLES)
    for name in ("forward", "loss"):
        quick: Callable[..., Any] = getattr(StageModel, name)

        def slowly(*arguments: Any, quick: Callable[..., Any] = quick, **options: Any) -> Any:
            time.sleep(SLOW_S)
            return quick(*arguments, **options)

        monkeypatch.setattr(StageModel, name, slowly)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("trust", ["friends", pytest.param("public", marks=pytest.mark.soak)])
def test_three_and_one_become_two_and_two_though_two_lie_about_speed(trust: str, tmp_path: Path) -> None:
    manifest = manifest_of(
        run={"trust": trust},
        audits={"agreements_to_promote": 1},
        batch={"target_tokens": 256},
        optimizer={"total_steps": 400},
        limits={"founders_per_stage": 1, "min_replicas": 1, "rebalance_s": 0.05},
        checkpoint={"every_steps": 400, "snapshot_every": 4},
        deadlines={"call_s": 2.0, "hop_s": 10.0, "step_s": 10.0, "lease_s": 1.0, "drain_s": 1.0},
    )

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 1), wrap=liar) as swarm:
            await swarm.until(lambda: stages(swarm) == [2, 2], timeout_s=60)
            (posted,) = (event for event in swarm.events if event["event"] == "posted")
            assert (posted["from"], posted["stage"]) == (0, 1)
            await swarm.until_version(swarm.host.progress.done_versions() + 3 * SETTLES)
            assert stages(swarm) == [2, 2]
            assert sum(event["event"] == "posted" for event in swarm.events) == 1
        assert Branches.read(tmp_path / "host" / "ledger.sqlite").breaches() == []

    asyncio.run(scenario())


def stages_of_peers(ledger: Ledger) -> list[int]:
    """How many peers serve each stage, by where each was admitted last."""
    admissions: list[Any] = [event.facts for event in ledger.events("admitted")]
    at = {facts["peer"]: facts["stage"] for facts in admissions}
    return [list(at.values()).count(0), list(at.values()).count(1)]


def microbatches_per_s(steps: Sequence[tuple[float, int]]) -> float:
    """Of steps, each with when it ended and its microbatches, those after the first."""
    return sum(num for _, num in steps[1:]) / (steps[-1][0] - steps[0][0])


MEASURED_STEPS = 8


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("trust", ["friends", "public"])
def test_processes_become_even_by_themselves_and_train_as_much_faster(
    trust: str, zygote: Zygote, tmp_path: Path
) -> None:
    """Each peer does four microbatches a second, as if on a machine of its own: 5 and 1 do four, 3 and 3 do twelve."""
    with ProcessSwarm(
        zygote,
        tmp_path,
        founders=1,
        steps=100_000,
        every=100_000,
        delay=1,
        target_tokens=3072,
        in_flight=4,
        trust=trust,
        rebalance_s=1.5,
        slow_s=0.25,
    ) as swarm:
        swarm.start_host()
        for stage, letters in ((0, "abcde"), (1, "a")):
            for letter in letters:
                swarm.start_peer(f"p{stage}{letter}", stage)
        swarm.wait_for("version", version=2)
        ledger = Ledger(tmp_path / "host" / "ledger.sqlite")
        give_up_at = time.monotonic() + 180
        while stages_of_peers(ledger) != [3, 3]:
            assert time.monotonic() < give_up_at, f"still {stages_of_peers(ledger)}"
            time.sleep(0.5)
        swarm.wait_for("joined", stage=1, timeout_s=60)
        even_at, before = time.time(), len(swarm.events())
        swarm.wait_for_more("version", after=before, count=2 * MEASURED_STEPS, timeout_s=180)
        moved = [event.at for event in ledger.events("admitted")][6:]
        results: list[tuple[float, Any]] = [(event.at, event.facts) for event in ledger.events("result")]
        ended = [(at, len(facts["ids"])) for at, facts in results if facts["stage"] == 0]
        uneven = microbatches_per_s([done for done in ended if done[0] < moved[0]])
        even = microbatches_per_s([done for done in ended if done[0] > even_at][-MEASURED_STEPS:])
        print(f"{uneven:.1f} microbatches a second, then {even:.1f}: {even / uneven:.2f} times as many")
        assert len(moved) == 2, "somebody went back and forth"
        assert even > 1.3 * uneven
        ledger.close()
        end_with_one_history(swarm)
    assert zygote.leftovers() == []
