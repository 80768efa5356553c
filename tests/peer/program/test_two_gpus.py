"""`swarm join --gpu all` on a machine with two GPUs, which are pretended: one daemon, one peer on each."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from peer.program.state_folder import StateFolder
from swarm.core.errors import NotRunningError
from swarm.network.identity_file import load_identity
from swarm.network.services.daemon_client import DaemonClient, daemon_client
from swarm.proto import daemon_pb2 as pb
from tests.peer.owner.test_owner_processes import ask
from tests.pretend_device import OTHERS, PRETEND
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(PRETEND not in OTHERS, reason="two GPUs are only pretended"),
]

WITHIN_S = 90.0


class Machine:
    """With two GPUs, and one folder for their daemon."""

    def __init__(self, swarm: ProcessSwarm, zygote: Zygote) -> None:
        self._swarm, self._zygote = swarm, zygote
        self.folder = swarm.root / "machine"
        self.log = swarm.root / "machine.log"

    def join(self) -> psutil.Process:
        argv = ["join", self._swarm.wait_for("listening")["invite"], "--yes", "--gpu", "all", "--threads", "1"]
        argv += ["--nice", "0", "--dir", str(self.folder), "--listen", "127.0.0.1:0", "--verbose"]
        self._swarm.peers["machine"] = self._zygote.start(argv, self.log, pretends=True)
        return psutil.Process(self._swarm.peers["machine"])

    def asked(self) -> contextlib.AbstractContextManager[DaemonClient]:
        """Its daemon, as its owner's commands have it."""
        return daemon_client(StateFolder(self.folder).running_at())

    def until(self, holds: Callable[[Sequence[pb.Peer]], bool]) -> Sequence[pb.Peer]:
        """What is told of its peers, once this holds of it."""
        give_up_at, peers = time.monotonic() + WITHIN_S, list[pb.Peer]()
        while time.monotonic() < give_up_at:
            with contextlib.suppress(NotRunningError), self.asked() as client:  # it is only starting
                peers = list(client.status().peers)
                if holds(peers):
                    return peers
            time.sleep(0.2)
        raise AssertionError(f"not within {WITHIN_S:g} s: {peers}")


def works(peers: Sequence[pb.Peer]) -> bool:
    return all(peer.work.certified_microbatches for peer in peers)


def test_two_gpus_train_both_stages_of_a_run_in_one_daemon(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=20_000, every=20_000, founders=1, min_replicas=1) as swarm:
        swarm.start_host()
        machine = Machine(swarm, zygote)
        daemon = machine.join()
        peers = machine.until(works)
        assert [(peer.name, peer.device) for peer in peers] == [("GPU 0", "pretend:1"), ("GPU 1", "pretend:2")]
        assert sorted(peer.place.stage for peer in peers) == [0, 1], "where the run needs them"
        ids = [peer.peer_id for peer in peers]
        assert ids[0] == load_identity(machine.folder / "identity.key").peer_id
        assert ids[1] == ask(zygote, "identity", "show", "--dir", str(machine.folder / "gpu-1")).strip()
        page = ask(zygote, "status", "--dir", str(machine.folder))
        assert "GPU 0  WORKING" in page
        assert "GPU 1  WORKING" in page
        assert "(GPU 1): " in machine.log.read_text(), "the log says whose a line is"

        with machine.asked() as client:
            client.pause()
            machine.until(lambda peers: [peer.state for peer in peers] == ["paused", "paused"])
            client.resume()

        started = daemon.children(recursive=True)
        assert sum(child.name() == "p2pd" for child in started) == 2
        daemon.send_signal(signal.SIGKILL)
        zygote.exit_code(daemon.pid, timeout_s=30)
        assert not psutil.wait_procs(started, timeout=10)[1], "nothing is left behind"

        machine.join()
        again = machine.until(works)
        assert [peer.peer_id for peer in again] == ids
        assert "left after" in ask(zygote, "leave", "--dir", str(machine.folder))
        assert zygote.exit_code(swarm.peers["machine"], timeout_s=30) == 0
        os.kill(swarm.host, signal.SIGKILL)
        zygote.exit_code(swarm.host, timeout_s=30)
    assert zygote.leftovers() == []
