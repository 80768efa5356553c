"""Microbatches: the tokens the data order names, targets one place on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.core.ids import MicrobatchId
from swarm.core.settings import RunSettings
from swarm.data.batches import BatchReader, held_out_batches
from swarm.data.prepare import prepare_data
from swarm.data.token_file import TokenFile, TokenWriter
from swarm.manifest.file import freeze, parse_manifest

LENGTH, SIZE = 12, 3


def _run(folder: Path) -> tuple[RunSettings, TokenFile, TokenFile]:
    text = np.random.default_rng(0).integers(97, 123, 5000, dtype=np.uint8).tobytes()
    (folder / "t.txt").write_bytes(text)
    manifest = parse_manifest(
        f'[data]\ntext = ["t.txt"]\nsequence_length = {LENGTH}\n[batch]\nmicrobatch_size = {SIZE}', folder / "run.toml"
    )
    prepared = prepare_data(manifest.data, folder / "out")
    return freeze(manifest, prepared, ()), prepared.train(), prepared.held_out()


def test_batch_holds_the_tokens_of_its_id(tmp_path: Path) -> None:
    settings, train, _ = _run(tmp_path)
    reader = BatchReader(settings, train)
    whole = train.read(0, len(train))
    for number in (0, 1, reader.order.microbatches_per_lap - 1, reader.order.microbatches_per_lap, 12345):
        tokens_BL, targets_BL = reader.batch(MicrobatchId(number))
        assert tokens_BL.shape == targets_BL.shape == (SIZE, LENGTH)
        assert tokens_BL.dtype == targets_BL.dtype == np.int64
        for row, start in enumerate(reader.order.sample_starts(MicrobatchId(number))):
            assert tokens_BL[row].tolist() == whole[start : start + LENGTH].tolist()
            assert targets_BL[row].tolist() == whole[start + 1 : start + 1 + LENGTH].tolist()


def test_file_of_another_length_is_refused(tmp_path: Path) -> None:
    settings, train, held_out = _run(tmp_path)
    with pytest.raises(ValueError, match=f"holds {len(held_out)} tokens, the run says {len(train)}"):
        BatchReader(settings, held_out)


def test_held_out_batches_go_through_the_file_without_overlap(tmp_path: Path) -> None:
    settings, _, held_out = _run(tmp_path)
    batches = held_out_batches(settings, held_out, limit_tokens=10**9)
    whole = held_out.read(0, len(held_out))
    num_windows = (len(held_out) - 1) // LENGTH
    tokens = np.concatenate([tokens_BL.ravel() for tokens_BL, _ in batches])
    targets = np.concatenate([targets_BL.ravel() for _, targets_BL in batches])
    assert tokens.tolist() == whole[: num_windows * LENGTH].tolist()
    assert targets.tolist() == whole[1 : num_windows * LENGTH + 1].tolist()
    assert [len(tokens_BL) for tokens_BL, _ in batches[:-1]] == [SIZE] * (len(batches) - 1)


@pytest.mark.parametrize(("limit", "expected"), [(1, LENGTH), (LENGTH * 4, LENGTH * 4), (LENGTH * 5 - 1, LENGTH * 4)])
def test_held_out_batches_keep_to_the_limit(tmp_path: Path, limit: int, expected: int) -> None:
    settings, _, held_out = _run(tmp_path)
    batches = held_out_batches(settings, held_out, limit_tokens=limit)
    assert sum(targets_BL.size for _, targets_BL in batches) == expected


def test_equal_ids_give_equal_batches_whatever_was_read_before(tmp_path: Path) -> None:
    settings, train, _ = _run(tmp_path)
    one, other = BatchReader(settings, train), BatchReader(settings, TokenFile(train.path, 1))
    other.batch(MicrobatchId(7))
    np.testing.assert_array_equal(one.batch(MicrobatchId(3)), other.batch(MicrobatchId(3)))
    reseeded = replace(settings, data=replace(settings.data, seed=1))
    orders = [[reader.order.sample_starts(MicrobatchId(n)) for n in range(40)] for reader in (one, other)]
    assert orders[0] == orders[1]
    assert orders[0] != [BatchReader(reseeded, train).order.sample_starts(MicrobatchId(n)) for n in range(40)]


def test_wide_ids_survive(tmp_path: Path) -> None:
    settings, train, _ = _run(tmp_path)
    with TokenWriter(tmp_path / "wide", 4) as writer:
        writer.write(train.read(0, len(train)) + 100_000)
    wide = BatchReader(settings, TokenFile(tmp_path / "wide", 4)).batch(MicrobatchId(2))
    np.testing.assert_array_equal(wide[0], BatchReader(settings, train).batch(MicrobatchId(2))[0] + 100_000)
