"""`swarm rollback` on a run of real processes: a peer dies on the way, the host is killed after it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bootstrap.ledger import Ledger
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = [pytest.mark.processes, pytest.mark.soak]

SKIPPED = set(range(200, 220))


def test_a_live_run_is_rolled_back_and_its_host_killed_and_started_again(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=80, every=8) as swarm:
        swarm.start_host(listen="127.0.0.1:0")
        swarm.start_founders()
        port = swarm.wait_for("listening")["addresses"][0].split("/tcp/")[1].split("/")[0]
        swarm.wait_for("version", version=14)
        swarm.kill("p1a")
        command = ["rollback", str(tmp_path / "host"), "--yes", "--skip", "200:220", "--wait", "60"]
        asked = zygote.start(command, tmp_path / "rollback.log")
        assert zygote.exit_code(asked, timeout_s=90) == 0, (tmp_path / "rollback.log").read_text()
        done = swarm.wait_for("rolled_back")
        assert f"goes on as version {done['version']}" in (tmp_path / "rollback.log").read_text()
        swarm.wait_for("version", version=done["version"] + 2)

        os.kill(swarm.host, signal.SIGKILL)
        assert zygote.exit_code(swarm.host, timeout_s=10) == -9
        swarm.start_host(listen=f"127.0.0.1:{port}")
        assert swarm.wait_for("recovered", timeout_s=90)["version"] >= done["version"] + 2
        report = swarm.finish(timeout_s=180)
        assert report["steps"] == 80
        for digests in report["state_digests"].values():
            assert len(set(digests.values())) == 1

        ledger = Ledger(tmp_path / "host" / "ledger.sqlite")
        results: list[Any] = [event.facts for event in ledger.events("result")]
        ledger.close()
        branch = {facts["step"]: facts["ids"] for facts in results if facts["stage"] == 0}
        kept = [number for step, ids in branch.items() if step < done["to"] for number in ids]
        new = [number for step, ids in branch.items() if step >= done["version"] for number in ids]
        assert len(kept + new) == len(set(kept + new)), "a sample was taken twice in one branch"
        assert SKIPPED.isdisjoint(new)
        assert set(range(max(new) - 100)) <= {*kept, *new, *SKIPPED}, "a sample was lost"
        assert sorted(branch)[-1] == 79
    assert zygote.leftovers() == []
