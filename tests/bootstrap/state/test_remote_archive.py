"""Checkpoints at a URL: there whole or not there, every byte checked, copied again when the URL did not answer."""

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bootstrap.state.remote_archive import ArchiveCopies, RemoteArchive, open_place
from bootstrap.state.run_folder import prepare_run
from swarm.checkpoint.record import CheckpointRecord, files_below
from swarm.checkpoint.state import state_digest
from swarm.cli import ExitCode, run
from swarm.core.errors import LocalError, SettingsError
from swarm.identity.key import Identity
from swarm.manifest.file import parse_manifest
from tests.bootstrap.state.hosted import hosted
from tests.swarm_in_process import manifest_of

RUN_ID, RUN_KEY = "ab" * 32, Identity.generate()
MEMORY = "memory://bucket/archive"


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def checkpoint(folder: Path, version: int) -> CheckpointRecord:
    """Files as those of a checkpoint lie, and the run key's record of them."""
    path = folder / f"step-{version:08d}"
    (path / "tokenizer").mkdir(parents=True)
    for name in ("checkpoint.json", "stage-0.safetensors", "tokenizer/tokenizer.json"):
        (path / name).write_bytes(name.encode() * (version << 16))
    return CheckpointRecord(RUN_ID, version, True, (bytes(32),), files_below(path)).signed_by(RUN_KEY)


def archive_at(url: str) -> RemoteArchive:
    return RemoteArchive(open_place(url), RUN_ID, RUN_KEY.peer_id)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_is_put_comes_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    archive = archive_at(MEMORY if kind == "memory" else f"file://{tmp_path}/archive")
    assert archive.versions() == []
    records = [checkpoint(tmp_path, version) for version in (1, 2)]
    for record in records:
        archive.put(record, tmp_path / f"step-{record.version:08d}")
    assert archive.versions() == [1, 2]
    (tmp_path / "again").mkdir()
    assert files_below(archive.fetch(2, tmp_path / "again")) == records[1].files
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["step-00000002"]
    other = RemoteArchive(open_place(archive.url), "cd" * 32, RUN_KEY.peer_id)
    assert other.versions() == []


def test_a_copy_that_breaks_off_is_not_there(tmp_path: Path) -> None:
    archive, record = archive_at(MEMORY), checkpoint(tmp_path, 1)
    lost = tmp_path / "step-00000001" / "tokenizer" / "tokenizer.json"
    kept = lost.rename(tmp_path / "kept")
    with pytest.raises(LocalError, match=r"memory://bucket/archive: keeping checkpoint 1: .*tokenizer.json"):
        archive.put(record, tmp_path / "step-00000001")
    assert archive.versions() == []
    kept.rename(lost)
    archive.put(record, tmp_path / "step-00000001")
    assert archive.versions() == [1]


@pytest.mark.parametrize("name", ["step-00000001/stage-0.safetensors", "step-00000001.record"])
def test_what_was_changed_at_the_url_is_refused(tmp_path: Path, name: str) -> None:
    archive, record = archive_at(MEMORY), checkpoint(tmp_path, 1)
    archive.put(record, tmp_path / "step-00000001")
    files, path = fsspec.filesystem("memory"), f"/bucket/archive/{RUN_ID[:12]}/{name}"
    data = bytearray(files.cat_file(path))
    data[len(data) // 2] ^= 1
    files.pipe_file(path, bytes(data))
    (tmp_path / "again").mkdir()
    with pytest.raises(LocalError, match=r"stage-0.safetensors is damaged|fetching checkpoint 1"):
        archive.fetch(1, tmp_path / "again")
    assert not (tmp_path / "again" / "step-00000001").exists()


def test_a_url_that_nothing_opens_is_refused_with_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    with pytest.raises(SettingsError, match=r"--archive s3://bucket/runs: Install s3fs.*file:///mnt/archive"):
        open_place("s3://bucket/runs")
    (tmp_path / "run.toml").write_text('[model]\npreset = "tiny"\n')
    assert run(["host", str(tmp_path / "run.toml"), "--archive", "nothing://x"]) is ExitCode.BAD_INPUT
    assert "--archive nothing://x: Protocol not known: nothing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_copies_go_on_after_the_url_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.state.remote_archive.TRY_AGAIN_S", 0.01)
    (tmp_path / "archive").write_text("in the way")
    records = [checkpoint(tmp_path, 1)]

    async def main() -> None:
        events = asyncio.Queue[dict[str, Any]]()
        copies = ArchiveCopies(archive_at(f"file://{tmp_path}/archive"), tmp_path, lambda: records, events.put_nowait)
        running = asyncio.ensure_future(copies.run())
        async with asyncio.timeout(10):
            assert (await events.get())["event"] == "not_archived"
            (tmp_path / "archive").unlink()
            while (told := await events.get())["event"] == "not_archived":
                pass
            assert (told["event"], told["version"]) == ("archived", 1)
            running.cancel()
            records.extend(checkpoint(tmp_path, version) for version in (2, 3))
            shutil.rmtree(tmp_path / "step-00000002")  # the folder keeps the last ones only
            await copies.finish()
            assert (await events.get())["version"] == 3
            assert events.empty()

    asyncio.run(main())


def test_a_host_that_lost_its_checkpoints_begins_from_the_url(tmp_path: Path) -> None:
    async def main() -> bytes:
        async with hosted(tmp_path) as host:
            record = host.archive(5)
            archive = RemoteArchive(open_place(MEMORY), host.run.run_id, host.run.run_key.peer_id)
            archive.put(record, host.run.folder.checkpoints / "step-00000005")
            shutil.rmtree(host.run.folder.checkpoints)
            return record.state_digests[0]

    digest = asyncio.run(main())
    manifest = parse_manifest(manifest_of(), tmp_path / "run.toml")
    again = prepare_run(manifest, tmp_path / "host", lambda what: None, open_place(MEMORY))
    assert again.version == 5
    assert state_digest(again.states[0]) == digest
