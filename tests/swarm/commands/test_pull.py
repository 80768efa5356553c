"""`swarm pull`: the model as the run key signed it, from a host without peers; anything else is refused."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from bootstrap.state.archivist import SPARED_S
from swarm.checkpoint.archive import keep_last, read_checkpoint
from swarm.checkpoint.record import MAX_FILE_BYTES
from swarm.cli import ExitCode, run
from swarm.model.stack import stage_layout
from tests.bootstrap.state.hosted import Hosted, hosted


async def pulled(host: Hosted, folder: Path, *options: str) -> ExitCode:
    return await asyncio.to_thread(run, ["pull", host.doors.invite.line(), str(folder), *options])


def test_newest_anchored_checkpoint_becomes_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def pull() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5, seed=1)
            host.archive(10, seed=2)
            expected = {}
            for stage, state in enumerate(host.run.states):
                layout = stage_layout(host.run.settings.model, stage)
                expected |= {name: view.copy() for name, view in layout.views(state.weights).items()}
            host.archive(15, anchored=False, seed=3)  # one donor's word: nobody takes that away
            assert await pulled(host, tmp_path / "model") is ExitCode.OK
            found = load_file(tmp_path / "model" / "model.safetensors")
            assert found.keys() == expected.keys()
            assert all((found[name] == expected[name]).all() for name in expected)
            assert (tmp_path / "model" / "tokenizer.json").is_file()

    asyncio.run(pull())
    assert "checkpoint 10:" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host", "model", "text.txt"]


def test_adapters_come_for_peft_or_merged_into_their_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def pull() -> None:
        async with hosted(tmp_path, adapters={"rank": 4}) as host:
            host.archive(5, seed=1)
            assert await pulled(host, tmp_path / "adapters") is ExitCode.OK
            found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
            assert len(found) == sum(len(state.layout.names) for state in host.run.states)
            base = str(host.run.folder.base)
            assert await pulled(host, tmp_path / "model", "--base", base) is ExitCode.OK
            assert "lm_head.weight" in load_file(tmp_path / "model" / "model.safetensors")

    asyncio.run(pull())
    said = capsys.readouterr().out
    assert "load it onto its base with peft" in said
    assert "swarm generate" in said


def test_moments_are_fetched_only_for_who_keeps_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pull() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5)
            path, keep = host.run.folder.checkpoints / "step-00000005", ("--keep-checkpoint", str(tmp_path / "kept"))
            for moments in path.glob("*.optimizer.safetensors"):
                moments.rename(moments.with_suffix(".away"))
            assert await pulled(host, tmp_path / "model") is ExitCode.OK
            assert await pulled(host, tmp_path / "other", *keep) is not ExitCode.OK
            for moments in path.glob("*.away"):
                moments.rename(moments.with_suffix(".safetensors"))
            assert await pulled(host, tmp_path / "other", *keep) is ExitCode.OK

    asyncio.run(pull())
    assert len(list((tmp_path / "kept").glob("*.optimizer.safetensors"))) == 2


def test_a_kept_checkpoint_of_an_earlier_pull_is_not_mixed_with_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()

    async def pull() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5)
            assert await pulled(host, tmp_path / "model", "--keep-checkpoint", str(kept)) is ExitCode.OK
            host.archive(10, seed=1)
            assert await pulled(host, tmp_path / "newer", "--keep-checkpoint", str(kept)) is ExitCode.BAD_INPUT

    asyncio.run(pull())
    assert f"{kept} is not an empty folder; give a new one" in capsys.readouterr().err
    assert read_checkpoint(kept).version == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host", "kept", "model", "text.txt"]


def test_run_without_a_checkpoint_and_a_folder_in_use_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pull() -> None:
        async with hosted(tmp_path) as host:
            assert await pulled(host, tmp_path / "model") is ExitCode.FAILED
            assert "0 checkpoints, none of them anchored" in capsys.readouterr().err
            assert await pulled(host, tmp_path / "host") is ExitCode.BAD_INPUT
            assert "is not an empty folder" in capsys.readouterr().err

    asyncio.run(pull())


def test_host_that_sends_other_bytes_than_were_signed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pull() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5)
            weights = host.run.folder.checkpoints / "step-00000005" / "stage-1.safetensors"
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
            assert await pulled(host, tmp_path / "model") is ExitCode.FAILED
            assert (
                "stage-1.safetensors of checkpoint 5 is not the one that the run key signed" in capsys.readouterr().err
            )
            assert not (tmp_path / "model").exists()
            # Mended: what was whole is not asked again, and the damaged file is.
            data[-1] ^= 1
            weights.write_bytes(data)
            assert await pulled(host, tmp_path / "model") is ExitCode.OK

    asyncio.run(pull())


def test_a_checkpoint_that_is_being_fetched_stays_and_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def pull() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5)
            folder = host.run.folder.checkpoints
            away = (folder / "step-00000005" / "stage-1.safetensors").rename(tmp_path / "away")
            assert await pulled(host, tmp_path / "model") is ExitCode.FAILED
            away.rename(folder / "step-00000005" / "stage-1.safetensors")
            for version in (10, 15):
                host.archive(version, seed=version)
            now = asyncio.get_running_loop().time()
            assert host.itself.downloads.lately(now=now) == [5]
            keep_last(folder, 1, host.itself.downloads.lately(now=now))
            assert await pulled(host, tmp_path / "model") is ExitCode.OK
            assert host.itself.downloads.lately(now=now + 2 * SPARED_S) == []
            assert await pulled(host, tmp_path / "newer") is ExitCode.OK
            shutil.rmtree(folder / "step-00000005")
            (tmp_path / f".third.{host.run.run_id[:12]}" / "5").mkdir(parents=True)
            assert await pulled(host, tmp_path / "third") is ExitCode.OK

    asyncio.run(pull())
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint")]
    assert told == ["checkpoint 5", "checkpoint 5", "checkpoint 15", "checkpoint 15"]


def test_a_checkpoint_that_fills_the_disk_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host signs whatever sizes it likes, and serves as much."""

    async def pull() -> None:
        async with hosted(tmp_path) as host:
            record = host.archive(5)
            huge = replace(record, files=tuple(replace(file, size_bytes=MAX_FILE_BYTES) for file in record.files))
            host.itself.books.checkpoints[5] = huge.signed_by(host.run.run_key).to_value()
            assert await pulled(host, tmp_path / "model") is ExitCode.BAD_INPUT

    asyncio.run(pull())
    assert "name a FOLDER on another disk" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host", "text.txt"]
