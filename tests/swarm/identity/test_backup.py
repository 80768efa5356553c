"""Identities are backed up under a passphrase and come back; the unit that runs a peer is well formed."""

import configparser
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from peer.program.service_command import unit_of
from peer.program.state_folder import HeldFolder, StateFolder
from swarm.cli import ExitCode, run
from swarm.core.errors import SettingsError
from swarm.core.owner.limits import OwnerLimits
from swarm.identity import backup as identity_backup
from swarm.identity.backup import open_identity, seal_identity
from swarm.identity.key import Identity


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess may cost less here."""
    monkeypatch.setattr(identity_backup, "LOG2_N", 10)


HOST = Identity.from_seed(bytes(32)).peer_id


def test_a_backup_opens_with_its_passphrase_only() -> None:
    identity = Identity.generate()
    sealed = seal_identity(identity, "correct horse")
    assert open_identity(sealed, "correct horse").to_key_file_bytes() == identity.to_key_file_bytes()
    assert identity.to_key_file_bytes().hex()[8:72] not in sealed
    for text, passphrase in [
        (sealed, "correct hors"),
        (sealed.replace(identity.peer_id, HOST), "correct horse"),
        (sealed.replace('"log2_n": 10', '"log2_n": 40'), "correct horse"),
        ("{}", "correct horse"),
        ("[" * 5000, "correct horse"),
        ("", "correct horse"),
    ]:
        with pytest.raises(SettingsError):
            open_identity(text, passphrase)
    with pytest.raises(SettingsError, match="7 characters"):
        seal_identity(identity, "correct")


def test_an_identity_moves_to_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, backup = str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "backup")
    (tmp_path / "pass").write_text("correct horse\n")
    secret = ["--passphrase-file", str(tmp_path / "pass")]
    assert run(["identity", "export", backup, *secret, "--dir", old]) is ExitCode.BAD_INPUT
    assert run(["identity", "show", "--dir", old]) is ExitCode.OK
    peer_id = capsys.readouterr().out.strip()
    assert run(["identity", "export", backup, *secret, "--dir", old]) is ExitCode.OK
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o600
    assert run(["identity", "export", backup, *secret, "--dir", old]) is ExitCode.BAD_INPUT
    with HeldFolder(StateFolder(tmp_path / "new")):
        assert run(["identity", "import", backup, *secret, "--dir", new]) is ExitCode.BAD_INPUT
    assert run(["identity", "import", backup, *secret, "--dir", new]) is ExitCode.OK
    assert run(["identity", "import", backup, *secret, "--dir", new]) is ExitCode.BAD_INPUT
    capsys.readouterr()
    assert run(["identity", "show", "--dir", new]) is ExitCode.OK
    assert capsys.readouterr().out.strip() == peer_id


def test_a_passphrase_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, folder = tmp_path / "pass", str(tmp_path / "state")
    wrong.write_bytes(b"\xff\xfe")
    assert run(["identity", "show", "--dir", folder]) is ExitCode.OK
    argv = ["identity", "export", str(tmp_path / "backup"), "--passphrase-file", str(wrong), "--dir", folder]
    assert run(argv) is ExitCode.BAD_INPUT
    assert f"--passphrase-file {wrong}: cannot be read" in capsys.readouterr().err


def service_of(unit: str) -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(unit)
    return parsed["Service"]


def test_the_service_joins_without_asking_within_the_owners_limits(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "a folder")
    state.save_limits(OwnerLimits(threads=3, memory_gib=2.0))
    address = f"/ip4/192.0.2.1/tcp/4001/p2p/{HOST}"
    service = service_of(unit_of((address,), ":4001", state))
    assert service["ExecStart"].endswith(f"-m swarm join {address} --yes --listen :4001 --dir '{state.path}'")
    assert (service["CPUQuota"], service["MemoryMax"]) == ("300%", str(2 << 30))
    no_restart = (ExitCode.BAD_INPUT, ExitCode.SHUT_OUT, ExitCode.UPGRADE)
    assert service["RestartPreventExitStatus"].split() == [str(int(code)) for code in no_restart]
    assert {"NoNewPrivileges", "ProtectSystem", "SystemCallFilter"} <= set(service)
    # p2pd learns by it at which addresses others reach this machine.
    assert "AF_NETLINK" in service["RestrictAddressFamilies"].split()


def test_the_service_may_write_to_its_folder_whatever_it_is_called(tmp_path: Path) -> None:
    """systemd takes quotes off as a shell does, but reads backslashes within them too."""
    folder = tmp_path / "a folder, 100 % 'mine' \\x20 $HOME"
    unit = unit_of((f"/ip4/192.0.2.1/tcp/4001/p2p/{HOST}",), ":0", StateFolder(folder))

    def read(text: str) -> list[str]:
        return shlex.split(text.replace("%%", "%").replace("\\\\", "\\"))

    assert read(service_of(unit)["ReadWritePaths"]) == [str(folder), "%t"]
    assert read(service_of(unit)["ExecStart"].replace("$$", "$"))[-1] == str(folder)
    caches = [line.removeprefix("Environment=") for line in unit.splitlines() if line.startswith("Environment=")]
    assert [read(cache) for cache in caches] == [
        [f"NUMBA_CACHE_DIR={folder}/numba"],
        [f"TRITON_CACHE_DIR={folder}/triton"],
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_wrong_with_the_service(tmp_path: Path) -> None:
    unit = tmp_path / "homeswarm.service"
    folder = StateFolder(tmp_path / "a folder, 100 % 'mine' \\x20 $HOME")
    unit.write_text(unit_of((f"/ip4/192.0.2.1/tcp/4001/p2p/{HOST}",), ":4001", folder))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_service_is_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["install-service", "nowhere", "--print"]) is ExitCode.BAD_INPUT
    at = f"/ip4/192.0.2.1/tcp/1/p2p/{HOST}"
    assert run(["install-service", at, "--listen", "4001", "--print"]) is ExitCode.BAD_INPUT
    assert run(["install-service", at, "--listen", ":4001", "--print"]) is ExitCode.OK
    assert "--listen :4001" in capsys.readouterr().out
