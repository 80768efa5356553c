"""What a peer computes on: the first GPU that torch can use, unless its owner says otherwise."""

from pathlib import Path

import pytest

from peer.machine import gpus
from peer.machine.gpus import chosen_gpus, gpu_names
from peer.owner.limits import VolunteerSettings
from swarm.core.errors import SettingsError, TransientError
from swarm.core.owner.limits import OwnerLimits


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, names: str, cuda: str | None) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{names}'\n" if names else "#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(gpus, "torch_cuda", lambda: cuda)


@pytest.mark.parametrize(
    ("names", "cuda", "wanted", "number", "is_default", "said"),
    [
        ("NVIDIA X\\n", "13.0", "auto", 0, True, "GPU 0, NVIDIA X; choose otherwise with --gpu cpu"),
        ("NVIDIA X\\nNVIDIA Y\\n", "13.0", "auto", 0, True, "there are also GPU 1, NVIDIA Y: --gpu all"),
        ("NVIDIA X\\nNVIDIA Y\\n", "13.0", "1", 1, False, "GPU 1, NVIDIA Y, as you asked"),
        ("NVIDIA X\\n", "13.0", "cpu", None, False, "CPU, as you asked"),
        ("NVIDIA X\\n", None, "auto", None, True, "torch is built without CUDA for NVIDIA X"),
        ("", "13.0", "auto", None, True, "no NVIDIA driver"),
    ],
)
def test_what_is_chosen_is_said_and_why(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    names: str,
    cuda: str | None,
    wanted: str,
    number: int | None,
    is_default: bool,
    said: str,
) -> None:
    machine(monkeypatch, tmp_path, names, cuda)
    assert gpu_names() == names.split("\\n")[:-1]
    (chosen,) = chosen_gpus(wanted)
    assert (chosen.number, chosen.is_default) == (number, is_default)
    assert said in chosen.reason


def test_there_is_a_peer_on_each_gpu_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "NVIDIA X\\nNVIDIA Y\\nNVIDIA Z\\n", "13.0")
    limits = OwnerLimits()
    for written, kept, numbers in (("all", "all", [0, 1, 2]), ("2, 0", "0,2", [0, 2])):
        wanted = limits.with_value("gpu", written).gpu
        assert wanted == kept
        chosen = chosen_gpus(wanted)
        assert [gpu.number for gpu in chosen] == numbers
        assert not any(gpu.is_default for gpu in chosen)
    with pytest.raises(SettingsError, match="there is no GPU 3; there are 0: NVIDIA X; 1: NVIDIA Y; 2: NVIDIA Z"):
        chosen_gpus("1,3")
    for wrong, said in (("0,0", "named twice"), ("0,b", "numbers of GPUs"), ("", "numbers of GPUs")):
        with pytest.raises(SettingsError, match=said):
            limits.with_value("gpu", wrong)
    machine(monkeypatch, tmp_path, "", "13.0")
    with pytest.raises(TransientError, match="no NVIDIA driver tells of a GPU"):  # the machine may be starting
        chosen_gpus("all")
    monkeypatch.setattr(gpus.shutil, "which", lambda _: None)
    with pytest.raises(SettingsError, match="no NVIDIA driver tells of a GPU"):
        chosen_gpus("all")


def test_a_gpu_that_nobody_asked_for_is_left_where_the_stage_does_not_fit(tmp_path: Path) -> None:
    def devices(gpu: int | None, *, is_default: bool) -> tuple[str, ...]:
        return VolunteerSettings(folder=tmp_path, threads=1, gpu=gpu, gpu_is_default=is_default).devices

    assert devices(0, is_default=True) == ("cuda:0", "cpu")
    assert devices(1, is_default=False) == ("cuda:1",)
    assert devices(None, is_default=True) == ("cpu",)
