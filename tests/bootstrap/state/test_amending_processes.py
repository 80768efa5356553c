"""`swarm amend`, typed: of a run that goes on, and of one that is over."""

from pathlib import Path

import pytest

from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]


def amend(swarm: ProcessSwarm, *changes: str) -> str:
    """What the command says; it must end well."""
    log = swarm.root / "amend.log"
    arguments = [word for change in changes for word in ("--set", change)]
    pid = swarm.zygote.start(["amend", str(swarm.root / "host"), *arguments, "--yes"], log)
    code, said = swarm.zygote.exit_code(pid, timeout_s=60), log.read_text()
    assert code == 0, said[-3000:]
    return said


def test_a_run_is_cut_anew_while_it_goes_on_and_lengthened_when_it_is_over(zygote: Zygote, tmp_path: Path) -> None:
    swarm = ProcessSwarm(
        zygote,
        tmp_path,
        founders=1,
        min_replicas=1,
        steps=400,
        every=1000,
        target_tokens=512,
        slow_s=0.1,
        stays=True,
    )
    with swarm:
        manifest = tmp_path / "run.toml"
        manifest.write_text(manifest.read_text().replace("num_hidden_layers = 2", "num_hidden_layers = 3"))
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=3)
        said = amend(swarm, "optimizer.total_steps=120", "model.stages=3")
        assert "optimizer.total_steps: 400 -> 120" in said
        at = swarm.wait_for("amended", timeout_s=120)["version"]
        swarm.start_peer("p2a", 2)
        swarm.wait_for("genesis", version=at)
        swarm.wait_for("over", timeout_s=180)
        before = len(swarm.events())
        assert "as soon as its peers join again" in amend(swarm, "optimizer.total_steps=130")
        swarm.wait_for_more("listening", after=before, count=1, timeout_s=60)
        for stage in range(3):
            swarm.start_peer(f"p{stage}a", stage)
        swarm.wait_for_more("over", after=before, count=1, timeout_s=120)
    ledger, books = Ledger(tmp_path / "host" / "ledger.sqlite"), Books()
    books.catch_up(ledger)
    ledger.close()
    assert (len(books.amendments), books.ending) == (2, None)
    assert {stage: version for stage, (version, _) in books.versions.items()} == {0: 130, 1: 130, 2: 130}
    assert books.held_out[130] < books.held_out[0]
