"""The benchmark of many volunteers measures what it says, in a small run."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.churn.coordinator_load import MANIFEST, write_past
from bootstrap.program.host import Host, HostSettings
from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import prepare_run
from swarm.manifest.file import parse_manifest
from swarm.network.memory import MemoryNetwork
from tests.swarm_in_process import identity_of


def test_a_host_reads_the_past_that_is_written_for_it(tmp_path: Path) -> None:
    write_past(tmp_path, 3, [identity_of(number).peer_id for number in range(4)])

    async def main() -> None:
        run = prepare_run(parse_manifest(MANIFEST, tmp_path / "run.toml"), tmp_path / "run", lambda what: None)
        ledger = Ledger(run.folder.ledger)
        transport = MemoryNetwork(random.Random(0)).transport(run.host_key)
        host = Host(run, transport, ledger, HostSettings(), lambda event: None)
        assert host.progress.done_versions() == 3
        assert len(host.books.leaders(9)) == 4
        assert len(host.progress.peers) == 4
        ledger.close()

    asyncio.run(main())


@pytest.mark.soak
def test_volunteers_poll_without_errors() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.churn.coordinator_load",
        "--json",
        "--volunteers",
        "8",
        "--seconds",
        "5",
    ]
    done = subprocess.run([*command, "--steps", "20"], capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == 0
    assert found["calls"] >= 8 * 2
    assert set(found["methods_median_ms"]) == {"GetStatus", "ListPeers"}
