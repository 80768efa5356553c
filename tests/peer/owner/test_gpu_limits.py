"""The owner's limits on a GPU, without one: torch's and the driver's own words are faked, all else is real."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from peer.doctor.looks import Examination
from peer.doctor.probes import driver_gpus
from peer.machine.core_share import DaemonThreads
from peer.machine.load import Machine
from peer.owner.desk import OwnerDesk
from peer.owner.limits import GIB, VolunteerSettings, gpu_used_bytes
from peer.owner.log_lines import LogLines
from peer.owner.own_peer import OwnPeer
from peer.owner.room import Room
from peer.program.state_folder import StateFolder
from swarm.core.errors import SettingsError
from swarm.core.owner.guest import Conduct, Guest
from swarm.core.owner.limits import OwnerLimits
from swarm.identity.key import Identity

PMON = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       4321     G     60      1      -      -    game
"""


@dataclass
class Gpu:
    """What torch says of a GPU of 24 GiB, of which 20 are free."""

    shares: list[tuple[float, int]] = field(default_factory=list)

    def fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (20 * GIB, 24 * GIB))
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share, gpu: self.shares.append((share, gpu))
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 3 * GIB)


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int = 0) -> None:
    """A nvidia-smi that says this."""
    (folder / "said").write_text(said)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n/bin/cat {folder / 'said'}\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("limit_gib", "needs_gib", "refusal"),
    [
        (8, 7, None),
        (8, 9, r"needs 9\.00 GiB of GPU memory and --gpu-memory-gib is 8\.00 GiB \(weights 9\.00 GiB\)"),
        (None, 19, None),
        (None, 21, r"needs 21\.00 GiB of GPU memory and free GPU memory is 20\.00 GiB"),
        (22, 21, r"free GPU memory is 20\.00 GiB"),
    ],
)
def test_a_stage_fits_the_gpu_or_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_gib: int | None, needs_gib: int, refusal: str | None
) -> None:
    gpu = Gpu()
    gpu.fake(monkeypatch)
    volunteer = VolunteerSettings(
        folder=tmp_path, threads=1, gpu=1, gpu_memory_bytes=None if limit_gib is None else limit_gib * GIB
    )
    items, me = {"device.weights": needs_gib * GIB}, Identity.from_seed(bytes(32)).peer_id
    room = Room(tmp_path, memory_bytes=None, disk_bytes=None)
    if refusal is None:
        room.take(me, 0, items, volunteer)
        assert gpu.shares == ([] if limit_gib is None else [(pytest.approx(limit_gib / 24), 1)])
    else:
        with pytest.raises(SettingsError, match=refusal):
            room.take(me, 0, items, volunteer)


def test_what_is_used_of_the_gpu_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu().fake(monkeypatch)
    assert gpu_used_bytes(0) == 3 * GIB

    async def used(*gpus: int) -> str:
        state, me = StateFolder(tmp_path), Identity.from_seed(bytes(32))
        threads = DaemonThreads(1, len(gpus) or 1)
        volunteers = [VolunteerSettings(folder=tmp_path, threads=1, gpu=gpu) for gpu in gpus or [None]]
        peers = [OwnPeer("", me, each, tmp_path, of) for each, of in zip(volunteers, threads.of, strict=True)]
        limits = OwnerLimits(gpu=",".join(map(str, gpus)) or "cpu", gpu_memory_gib=6.0)
        desk = OwnerDesk(peers, threads, state, limits, me.peer_id, LogLines(), asyncio.Event(), lambda: None)
        return {limit.name: limit.used for limit in desk.limits().limits}["gpu-memory-gib"]

    assert asyncio.run(used(0)) == "3.00"
    assert asyncio.run(used(0, 1)) == "3.00, 3.00"
    assert asyncio.run(used()) == ""


def test_a_peer_pauses_while_others_use_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, PMON)

    async def conduct(busy_gpu: float) -> Conduct:
        machine = Machine(tmp_path, gpus=[0, 1])
        reading = await machine.read(month_bytes=0, written_today_bytes=0, asked_to_pause=False, watch_gpu=True)
        assert reading.others_gpu_percent == 60
        return Guest(OwnerLimits(busy_gpu=busy_gpu)).decide(reading, now=0.0).conduct

    assert asyncio.run(conduct(50.0)) is Conduct.PAUSE
    assert asyncio.run(conduct(70.0)) is Conduct.WORK


def test_the_doctor_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(wanted: str) -> list[str]:
        StateFolder(tmp_path).save_limits(OwnerLimits().with_value("gpu", wanted))
        examination = Examination(StateFolder(tmp_path), (), "127.0.0.1:0")
        return [found.says async for found in examination._machine() if found.name == "GPU"]

    driver(tmp_path, monkeypatch, "NVIDIA X, 570.1, 24576 MiB, 20480 MiB\n")
    assert asyncio.run(driver_gpus()) == ["NVIDIA X, 570.1, 24576 MiB, 20480 MiB"]
    assert asyncio.run(told("1")) == ["GPU 1 is asked for, and there are 1"]
    assert asyncio.run(told("0"))[0].startswith("GPU 0: NVIDIA X, 570.1")
    assert asyncio.run(told("all"))[0].startswith("GPU 0: NVIDIA X, 570.1")
    assert asyncio.run(told("0,1")) == ["GPU 0,1 is asked for, and there are 1"]
    driver(tmp_path, monkeypatch, "NVIDIA-SMI has failed because it could not communicate with the driver", code=9)
    assert asyncio.run(told("0")) == ["GPU 0 is asked for, and nvidia-smi does not answer"]
