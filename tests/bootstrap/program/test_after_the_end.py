"""What a host does once its run is over: it serves what came of it, and tells who comes late."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from bootstrap.program.ledger import Ledger
from swarm.cli import ExitCode, run
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes


def test_a_host_goes_on_serving_what_came_of_its_run(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=8, every=4, founders=1, min_replicas=1, stays=True) as swarm:
        swarm.start_host()
        swarm.start_founders()
        over = swarm.wait_for("over")
        assert over["held_out_loss"]["end"] < over["held_out_loss"]["start"]
        assert Path(over["checkpoint"]).is_dir()
        measured = [event["version"] for event in swarm.events() if event["event"] == "evaluation"]
        assert (measured[0], measured[-1]) == (0, 8)
        steps = [event for event in swarm.events() if event["event"] == "version"]
        told = [(step["version"], step["total_steps"], step["peers"]) for step in steps]
        assert told == [(number, 8, 2) for number in range(1, 9)]
        for name in swarm.peers:
            swarm.has_left(name)
        with closing(Ledger(tmp_path / "host" / "ledger.sqlite")) as ledger:
            figures = [event.facts for event in ledger.events() if event.kind == "figures"]
        assert [of_step["step"] for of_step in figures] == [*range(8)], "the last steps' too"

        assert run(["pull", over["invite"], str(tmp_path / "model")]) is ExitCode.OK
        assert (tmp_path / "model" / "model.safetensors").exists()
        swarm.start_peer("late", 0)
        swarm.has_left("late")
        said = (tmp_path / "late.log").read_text()
        assert said.index("asking the run's host") < said.index("the run is over")

        os.kill(swarm.host, signal.SIGINT)
        assert swarm.finish()["steps"] == 8
        swarm.start_host()  # of a run that is over
        again = swarm.wait_for("over")
        assert again["held_out_loss"]["end"] == over["held_out_loss"]["end"]
        os.kill(swarm.host, signal.SIGINT)
        assert zygote.exit_code(swarm.host, timeout_s=30) == 0
    assert zygote.leftovers() == []
