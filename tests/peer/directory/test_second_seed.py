"""The host is down, and a machine that had joined before starts again: another seed lets it in, which holds no key."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.directory.kept_answers import KeptAnswers
from swarm.core.ids import Version
from tests.peer.owner.test_owner_processes import status_of
from tests.process_swarm import ProcessSwarm, Zygote
from tests.swarm_in_process import manifest_of, swarm_in_process

BACK_S = 60.0


@pytest.mark.processes
@pytest.mark.soak
def test_a_peer_comes_back_through_another_seed_while_the_host_is_down(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=20_000, every=20_000, founders=2) as swarm:
        swarm.start_host()
        invite = swarm.wait_for("listening")["invite"]
        said = tmp_path / "seed.log"
        said.touch()
        argv = ["seed", invite, "--dir", str(tmp_path / "seed"), "--listen", "127.0.0.1:0", "--verbose"]
        seed = swarm.peers["seed"] = zygote.start(argv, said)
        wait_until(lambda: "\n" in said.read_text().partition("seed of kill-test at")[2])
        swarm.start_founders()
        swarm.wait_for("version", version=3)
        known = tmp_path / "p1b" / "known-peers.json"
        address = said.read_text().split("kill-test at ")[1].splitlines()[0]
        seed_id = address.rpartition("/p2p/")[2]
        wait_until(lambda: known.exists() and seed_id in known.read_text())

        swarm.kill("p1b")
        zygote.exit_code(swarm.peers["p1b"], timeout_s=30)
        swarm.wait_for_more("version", after=len(swarm.events()), count=4, timeout_s=60)  # it is off the roster
        os.kill(swarm.host, signal.SIGKILL)
        zygote.exit_code(swarm.host, timeout_s=30)
        read = json.loads(known.read_text())
        known.write_text(json.dumps({seed_id: read[seed_id]}))  # nobody but the seed is known
        argv = ["join", invite, "--stage", "1", "--dir", str(tmp_path / "p1b"), "--threads", "1", "--yes", "--verbose"]
        swarm.peers["p1b"] = zygote.start([*argv, "--listen", "127.0.0.1:0"], tmp_path / "p1b.log")
        wait_until(lambda: is_member(zygote, tmp_path / "p1b"))
        assert "but 1 peers or seeds met before do" in (tmp_path / "p1b.log").read_text()
        os.kill(seed, signal.SIGINT)
        assert zygote.exit_code(seed, timeout_s=30) == 0
    assert zygote.leftovers() == []


@pytest.mark.soak
def test_a_peer_comes_back_on_what_it_has_kept_while_the_host_is_down(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = manifest_of(optimizer={"total_steps": 5000}, checkpoint={"every_steps": 5000})
        async with swarm_in_process(manifest, tmp_path, peers=[2, 2]) as swarm:
            await swarm.until_version(3)
            gone, stays = swarm.of_stage(1)
            # Who killed the only member would have ended the stage.
            await swarm.until(lambda: all(one.daemon.at and one.steps.is_member for one in (gone, stays)))
            await swarm.kill(gone)
            await swarm.until(lambda: gone.peer_id not in stays.steps.chain.members)
            swarm.network.kill(swarm.run.host_key.peer_id)
            back = await swarm.restart(gone)
            async with asyncio.timeout(60):
                while back.daemon.at is None or not back.steps.is_member:
                    assert not back.task.done(), back.task.result()
                    await asyncio.sleep(0.05)
                assert await back.steps.wait_for_version(Version(back.steps.version + 2), timeout_s=60)

    asyncio.run(main())


def is_member(zygote: Zygote, folder: Path) -> bool:
    try:
        return bool((status_of(zygote, folder).get("place") or {}).get("is_member"))
    except subprocess.CalledProcessError:  # it is only starting
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + BACK_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {BACK_S:g} s"
        time.sleep(0.2)


def test_what_is_kept_outlives_the_daemon_and_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path / "answers")
    assert not kept.is_enough
    for about in ("run", "admit r None", "genesis r 0"):
        kept.keep(about, {"signature": b"of the run key", "about": about})
    again = KeptAnswers(tmp_path / "answers")
    assert again.is_enough
    assert again.get("genesis r 0") == {"signature": b"of the run key", "about": "genesis r 0"}
    (tmp_path / "answers").write_bytes(b"\xc1" + (tmp_path / "answers").read_bytes())
    assert KeptAnswers(tmp_path / "answers").get("run") is None
