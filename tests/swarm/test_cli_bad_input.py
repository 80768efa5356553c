"""Bad input: exit code 2, one message with field, value and remedy, nothing written, no traceback."""

import errno
import subprocess
import sys
from pathlib import Path

import click
import pytest

from swarm.cli import ExitCode, run
from tests.swarm.checkpoint.small_checkpoints import write_checkpoints

SWARM = [str(Path(sys.executable).parent / "swarm")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), versions=(8,))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _refused(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message on stderr; nothing below `folder` may have changed."""
    before = _files(folder)
    assert run(arguments) is ExitCode.BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert _files(folder) == before
    return printed.err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[model]\nstagess = 2", ["model.stagess = 2", 'did you mean "stages"?']),
        ("[batch]\ntarget_tokens = 'many'", ['batch.target_tokens = "many"', "give a whole number"]),
        ("[model]\nstages = 9", ["model.stages = 9", "4 layers", "set it to 4 or fewer"]),
        ("[data]\ntext = ['gone.txt']", ["data.text", "gone.txt", "correct the path"]),
        ("[checkpoint]\nsnapshot_every = 5", ["checkpoint.snapshot_every = 5", "checkpoint.every_steps = 48"]),
    ],
    ids=["unknown key", "wrong type", "more stages than layers", "missing file", "disagreement"],
)
def test_manifest_with_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    (tmp_path / "run.toml").write_text(text)
    message = _refused(["plan", str(tmp_path / "run.toml")], tmp_path, capsys)
    assert len(message.splitlines()) == 1
    for part in [str(tmp_path / "run.toml"), *parts]:
        assert part in message


def test_manifest_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = _refused(["plan", str(tmp_path / "gone.toml")], tmp_path, capsys)
    assert "gone.toml: the manifest cannot be read (No such file or directory)" in message
    assert "swarm init" in message


def test_whole_process_ends_with_2_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nstages = 0")
    done = subprocess.run([*SWARM, "plan", "run.toml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    remedy = "give a number greater than or equal to 1 (the default is 2)"
    assert done.stderr == f"swarm: run.toml: model.stages = 0 cannot be used; {remedy}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_init_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("mine")
    message = _refused(["init", str(tmp_path / "run.toml")], tmp_path, capsys)
    assert f'PATH = "{tmp_path}/run.toml" exists; give another name' in message


@pytest.mark.parametrize("path", ["file/run.toml", "nowhere/run.toml"])
def test_init_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    (tmp_path / "file").write_text("a file, no folder")
    message = _refused(["init", str(tmp_path / path)], tmp_path, capsys)
    assert f'PATH = "{tmp_path}/{path}" cannot be written' in message
    assert "give another folder" in message


@pytest.mark.parametrize("checkpoint", ["empty", "nowhere", "file"])
def test_export_of_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    message = _refused(["export", str(tmp_path / checkpoint), str(tmp_path / "out")], tmp_path, capsys)
    assert str(tmp_path / checkpoint) in message
    assert not (tmp_path / "out").exists()


def test_export_to_a_folder_with_something_in_it(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for target in ("full", "full/mine.txt", "full/mine.txt/out"):
        message = _refused(["export", str(checkpoints), str(tmp_path / target)], tmp_path, capsys)
        assert str(tmp_path / target) in message
        assert len(message.splitlines()) == 1


def test_generate_from_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = _refused(["generate", str(tmp_path), "once"], tmp_path, capsys)
    assert f"{tmp_path} is no Hugging Face model folder; write one with `swarm export`" in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fly"], "No such command 'fly'"),
        (["plan"], "Missing argument 'MANIFEST'"),
        (["plan", "run.toml", "--peers", "0"], "0 is not in the range"),
        (["plan", "run.toml", "--uplink-mbit", "fast"], "'fast' is not a valid float"),
        (["generate", "folder", "x", "--temperature", "-1"], "-1.0 is not in the range"),
        (["--wings"], "No such option '--wings'"),
    ],
)
def test_command_line_with_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert part.replace("'", "") in _refused(arguments, tmp_path, capsys).replace("'", "")


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/tokens")

    @click.command()
    def late() -> None:
        raise TimeoutError

    assert run([], of=full) is ExitCode.FAILED
    assert capsys.readouterr().err == "swarm: /runs/tokens: No space left on device\n"
    with pytest.raises(TimeoutError):
        run([], of=late)
