"""A real peer stands still in a round (SIGSTOP): the others end it in time; when it goes on it catches up, unblamed.

Its p2pd and its streams stay alive, so nothing breaks: only deadlines tell that it is gone.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes

PHASE_S = 2.0
ROUND_DEADLINE_S = 8 * PHASE_S
"""Four phases until a silent leader is given up, three until a member is, one for parts."""
LEARNT_AFTER = 3
"""Rounds, after which members know how long a phase is; until then it is as long as a call may take."""
STEPS = 12
OF_A_ROLE = ("closing", "closed", "roster", "aggregated", "result")
"""Moments that only whoever leads a round or reduces its part comes to, or only who does not: by chance few times."""


def run_and_stop(zygote: Zygote, root: Path, *, stage: int, moment: str, count: int) -> None:
    victim = f"p{stage}a"
    steps = STEPS if moment not in OF_A_ROLE else 18
    count = count if moment not in OF_A_ROLE else min(count, 2)
    with ProcessSwarm(zygote, root, steps=steps, founders=2) as swarm:
        swarm.start_host()
        swarm.start_founders(**{victim: {"moment": moment, "count": count, "number": int(signal.SIGSTOP)}})
        give_up_at = time.monotonic() + 60
        pause = threading.Event()
        while not zygote.is_stopped(swarm.peers[victim]):
            assert time.monotonic() < give_up_at, f"{moment} never came"
            pause.wait(0.02)
        stopped_at = len(swarm.events())
        left = steps - sum(1 for event in swarm.events() if event["event"] == "version")
        count = min(3, left)  # a member may come to lead late in the run only
        swarm.wait_for_more("version", after=stopped_at, count=count, timeout_s=count * (ROUND_DEADLINE_S + 2.0))
        os.kill(swarm.peers[victim], signal.SIGCONT)
        report = swarm.finish(timeout_s=120)
        assert report["steps"] == steps
        for name, pid in swarm.peers.items():
            assert zygote.exit_code(pid, timeout_s=30) == 0, f"{name} did not end well"
            assert "equivocation" not in (root / f"{name}.log").read_text(), f"{name} was blamed or blames"
        for of_stage, digests in report["state_digests"].items():
            assert len(set(digests.values())) == 1, f"replicas of stage {of_stage} differ"
        late = [e for e in swarm.events() if e["event"] == "step" and e["round_s"] > ROUND_DEADLINE_S + 2.0]
        # The stopped one's own lasted as long as it stood still: two, where the next was under way.
        assert len({e["peer_id"] for e in late}) <= 1, f"rounds of {[e['round_s'] for e in late]} s"
    assert zygote.leftovers() == []


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "moment"), [(0, "committed"), (1, "part")])
def test_a_round_ends_in_time_when_a_member_stands_still(
    zygote: Zygote, tmp_path: Path, stage: int, moment: str
) -> None:
    run_and_stop(zygote, tmp_path, stage=stage, moment=moment, count=LEARNT_AFTER + 1)


@pytest.mark.soak
@pytest.mark.drawn(8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "moment", ["closing", "closed", "committed", "ballot", "roster", "part", "aggregated", "vote", "result", "step"]
)
def test_a_round_ends_in_time_wherever_a_member_stands_still(
    zygote: Zygote, tmp_path: Path, moment: str, seed: int
) -> None:
    rng = random.Random(f"{moment}/{seed}")
    run_and_stop(zygote, tmp_path, stage=rng.randrange(2), moment=moment, count=LEARNT_AFTER + rng.randint(1, 4))
