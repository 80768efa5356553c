"""A stranger with the wheel alone: installed by pip into an empty environment, it does what the README says it does."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.soak]

INSTALL_S, COMMAND_S, TRAINED_S = 1200, 120, 180


class Stranger:
    """A user of the wheel, in an empty folder and with a home of their own."""

    def __init__(self, scripts: Path, home: Path, runtime: Path) -> None:
        self.home = home
        self._environment = {
            "PATH": f"{scripts}:/usr/bin:/bin",
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(runtime),  # short, for the sockets that lie there
        }

    def starts(self, *words: str) -> subprocess.Popen[bytes]:
        """Goes on in the background; `event` is what it says."""
        with (self.home / "said").open("wb") as said:
            return subprocess.Popen(words, cwd=self.home, env=self._environment, stdout=said, stderr=subprocess.STDOUT)

    def event(self, kind: str, *, within_s: float) -> dict[str, Any]:
        """The first of the kind that what was started says."""
        give_up_at = time.monotonic() + within_s
        while time.monotonic() < give_up_at:
            for line in (self.home / "said").read_text().split("\n")[:-1]:  # the last is being written
                if line.startswith(f'{{"event": "{kind}"'):
                    told: dict[str, Any] = json.loads(line)
                    return told
            time.sleep(0.1)
        raise AssertionError(f"no {kind} within {within_s:g} s: {(self.home / 'said').read_text()[-2000:]}")

    def does(self, *words: str) -> str:
        """What the command says; it must end well."""
        done = subprocess.run(
            words,
            cwd=self.home,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `swarm`, in an environment into which nothing but the wheel was installed."""
    root = tmp_path_factory.mktemp("wheel")
    clone = root / "clone"
    shutil.copytree(  # a build leaves folders beside its sources
        ROOT, clone, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "demo-out", "shared", "tests")
    )
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check"]  # -I: what lies in PYTHONPATH is not there
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(root), str(clone)], check=True, timeout=INSTALL_S)
    (wheel,) = root.glob("homeswarm-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True, timeout=INSTALL_S)
    pip[0] = str(root / "venv" / "bin" / "python")
    torch = f"torch=={version('torch').partition('+')[0]}"  # the one that is tested here; an open range may bring GBs
    subprocess.run([*pip, "install", "-q", str(wheel), torch], check=True, timeout=INSTALL_S)
    return root / "venv" / "bin"


@pytest.fixture
def stranger(scripts: Path, tmp_path: Path) -> Iterator[Stranger]:
    with tempfile.TemporaryDirectory(prefix="hs-") as runtime:
        yield Stranger(scripts, tmp_path, Path(runtime))
    for lock in tmp_path.rglob("daemon.lock"):  # of a test that failed before they left
        with contextlib.suppress(ValueError, KeyError, OSError):
            os.kill(int(json.loads(lock.read_text())["pid"]), signal.SIGKILL)


def test_a_stranger_hosts_joins_watches_pulls_and_leaves(stranger: Stranger) -> None:
    stranger.does("swarm", "init", "run.toml")
    manifest = stranger.home / "run.toml"
    manifest.write_text(manifest.read_text().replace("every_steps = 48", "every_steps = 8"))
    assert "tokens/s for the whole swarm" in stranger.does("swarm", "plan", "run.toml")
    host = stranger.starts("swarm", "host", "run.toml", "--listen", "127.0.0.1:0", "--json", "--ends-with-run")
    try:
        listening = stranger.event("listening", within_s=COMMAND_S)
        invite = listening["invite"]
        assert "nothing was found" in stranger.does("swarm", "doctor", invite)
        for folder in ("one", "two"):
            stranger.does("swarm", "join", invite, "--detach", "--yes", "--dir", folder, "--listen", "127.0.0.1:0")
        stranger.event("checkpoint", within_s=TRAINED_S)
        told = json.loads(stranger.does("swarm", "status", "--json", "--dir", "one"))
        assert (told["state"], told["reason"]) == ("working", "")
        (peer,) = told["peers"]
        assert peer["work"]["certified_microbatches"] > 0
        page = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode())"
        assert "<title>" in stranger.does("python", "-c", page, listening["web"])
        stranger.does("swarm", "pull", invite, "model")
        load = "import transformers as t; print(t.AutoModelForCausalLM.from_pretrained('model').num_parameters())"
        assert int(stranger.does("python", "-c", load)) > 0
        stranger.does("swarm", "generate", "model", "def ")
        for folder in ("one", "two"):
            assert "left after" in stranger.does("swarm", "leave", "--dir", folder)
        host.send_signal(signal.SIGINT)
        assert host.wait(30) == 0
    finally:
        host.kill()
        host.wait()
