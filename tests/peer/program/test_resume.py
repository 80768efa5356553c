"""A run goes on after everything was killed, after its host was, and with peers that come late or come back."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
from swarm.invite import parse_invite
from swarm.network.services.coordinator_client import coordinator_client
from tests.process_swarm import ProcessSwarm, Zygote
from tests.verification.histories import ids_by_step

pytestmark = pytest.mark.processes


@pytest.mark.soak
def test_a_run_goes_on_from_what_its_peers_hold_after_everything_was_killed(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=16, every=4) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("checkpoint", version=8)
        swarm.wait_for("version", version=9)
        for pid in (swarm.host, *swarm.peers.values()):
            os.kill(pid, signal.SIGKILL)
        for pid in (swarm.host, *swarm.peers.values()):
            assert zygote.exit_code(pid, timeout_s=30) == -9
        before = ids_by_step(swarm.root)

        swarm.start_host()
        swarm.start_founders()  # the same identities and folders as before
        report = swarm.finish()
        for name in swarm.peers:
            if (tmp_path / f"{name}.log").read_text().count("joined stage") < 2:
                swarm.leave(name)  # it did not get in again before the end, and would wait for its host to come back
            swarm.has_left(name)
        continued = swarm.wait_for("continued")
        assert continued["to"] >= max(before), "no more than the step under way is lost"
        assert report["steps"] == 16
        after = ids_by_step(swarm.root)
        kept = [step for step in range(16) if step < continued["to"] or step >= continued["version"]]
        used = [number for step in kept for number in after[step]]
        assert len(used) == len(set(used)), "a sample of what is kept was repeated"
        assert {step: after[step] for step in range(continued["to"])} == {s: before[s] for s in range(continued["to"])}
        for digests in report["state_digests"].values():
            assert len(set(digests.values())) == 1
    assert zygote.leftovers() == []


@pytest.mark.soak
def test_training_goes_on_without_the_host_and_the_host_takes_it_up_again(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=60, every=20, founders=1) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=4)
        with coordinator_client(parse_invite(swarm.wait_for("listening")["invite"])) as client:
            before = client.status()
        os.kill(swarm.host, signal.SIGKILL)
        assert zygote.exit_code(swarm.host, timeout_s=30) == -9
        swarm.start_host()
        recovered = swarm.wait_for("recovered", timeout_s=90)
        report = swarm.finish(timeout_s=120)
        assert recovered["version"] >= 4
        assert report["steps"] == 60
        # Nothing is lost, and nothing is credited twice: each step once in each stage, whatever the host missed.
        ledger = Ledger(tmp_path / "host" / "ledger.sqlite")
        facts: list[Any] = [event.facts for event in ledger.events("result")]
        books = Books()
        for event in ledger.events():
            books.apply(event)
            if event.number == before.num_events:
                assert books.history == before.books, "the host that was started again has other books"
        ledger.close()
        assert sorted((f["stage"], f["step"]) for f in facts) == [(stage, n) for stage in (0, 1) for n in range(60)]
        for done in facts:
            assert sum(num_microbatches for _, num_microbatches, _ in done["credit"]) == len(done["ids"])
        for pid in swarm.peers.values():
            assert zygote.exit_code(pid, timeout_s=30) == 0
    assert zygote.leftovers() == []


@pytest.mark.soak
def test_a_peer_that_comes_late_and_one_that_comes_back_hold_the_same_bytes(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=120, every=40, founders=2, target_tokens=512) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=3)
        swarm.kill("p0a")
        swarm.wait_for("left", stage=0)
        swarm.start_peer("p0a", 0)
        swarm.start_peer("p1c", 1)
        swarm.wait_for("joined", stage=0, timeout_s=90)
        swarm.wait_for("joined", stage=1, timeout_s=90)
        report = swarm.finish(timeout_s=180)
        assert report["steps"] == 120
        assert {stage: len(digests) for stage, digests in report["state_digests"].items()} == {"0": 2, "1": 3}
        for digests in report["state_digests"].values():
            assert len(set(digests.values())) == 1
    assert zygote.leftovers() == []
