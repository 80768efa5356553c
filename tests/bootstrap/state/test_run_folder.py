"""What a host refuses before it makes a run of a manifest, and how it takes up the run that is in its folder."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.owner.progress import RunProgress
from bootstrap.program.ledger import Ledger
from bootstrap.state.archivist import Archivist, Downloads
from bootstrap.state.beginning import StageStart
from swarm.checkpoint.state import state_digest
from swarm.core.errors import SettingsError
from swarm.core.pipeline.leases import LeaseTable
from tests.swarm.data.small_tokenizers import small_tokenizer
from tests.swarm_in_process import TINY_MODEL, manifest_of, prepare, sample_text


def test_a_rate_that_no_tensor_has_is_refused_with_the_words_that_there_are(tmp_path: Path) -> None:
    rates = [{"tensors": word, "times": 0.5} for word in ("lm_head", "head")]
    with pytest.raises(SettingsError, match=r'optimizer.rates: no tensor has "head" in its name; .*, lm_head, '):
        prepare(manifest_of(optimizer={"rates": rates}), tmp_path)


def _tokens(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "host" / "data").iterdir()}


@pytest.mark.parametrize("after", ["other text", "too short", "no text"])
def test_a_known_run_keeps_its_tokens_whatever_has_become_of_the_text(tmp_path: Path, after: str) -> None:
    first, tokens = prepare(manifest_of(), tmp_path), _tokens(tmp_path)
    if after == "no text":
        tables = {"data": {"text": ["moved.txt"]}}
    else:
        tables = {}
        (tmp_path / "text.txt").write_text(sample_text(50_000, seed=1) if after == "other text" else "short")
    assert prepare(manifest_of(**tables), tmp_path).run_id == first.run_id
    with pytest.raises(SettingsError, match=r"holds the run .* with other settings; choose another folder"):
        prepare(manifest_of(optimizer={"total_steps": 11}, **tables), tmp_path)
    assert _tokens(tmp_path) == tokens


def test_lost_tokens_of_a_known_run_are_made_again_of_its_text(tmp_path: Path) -> None:
    first, tokens = prepare(manifest_of(), tmp_path), _tokens(tmp_path)
    data = tmp_path / "host" / "data"
    (data / "train.tokens").unlink()
    (data / "held_out.tokens").write_bytes(b"damage" + tokens["held_out.tokens"][6:])
    again = prepare(manifest_of(), tmp_path)
    assert (again.run_id, again.data.pieces()) == (first.run_id, first.data.pieces())
    assert not (tmp_path / "host" / "data.again").exists()
    for name in ("prepared.json", "train.pieces"):  # their tokens are what the run's settings name
        (data / name).unlink()
    assert prepare(manifest_of(), tmp_path).data.pieces() == first.data.pieces()


def test_other_text_is_not_taken_for_lost_tokens_and_what_is_left_stays(tmp_path: Path) -> None:
    first, tokens = prepare(manifest_of(), tmp_path), _tokens(tmp_path)
    kept = first.data.held_out_path.rename(tmp_path / "kept")
    (tmp_path / "text.txt").write_text(sample_text(50_000, seed=1))
    with pytest.raises(SettingsError, match=r"held_out.tokens: missing .* gives another train.tokens: digest .* --dir"):
        prepare(manifest_of(), tmp_path)
    kept.rename(first.data.held_out_path)
    assert _tokens(tmp_path) == tokens
    assert not (tmp_path / "host" / "data.again").exists()
    assert prepare(manifest_of(), tmp_path).run_id == first.run_id


def test_another_mixture_is_another_run(tmp_path: Path) -> None:
    for name in ("some", "more"):
        rows = sample_text(40_000, seed=len(name)).splitlines()
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    sources = [{"text": ["some.jsonl"], "weight": 3}, {"text": ["more.jsonl"], "weight": 1}]

    def mixed(*mixture: object) -> str:
        return manifest_of(data={"text": None, "mixture": list(mixture)})

    first = prepare(mixed(*sources), tmp_path)
    assert prepare(mixed(*sources), tmp_path).run_id == first.run_id
    for other in (sources[:1], [*sources, sources[0]], [sources[0], {**sources[1], "weight": 2}]):
        with pytest.raises(SettingsError, match="with other settings"):
            prepare(mixed(*other), tmp_path)
    with pytest.raises(SettingsError, match="with other settings"):
        prepare(manifest_of(), tmp_path)


def test_checkpoints_have_the_tokenizer_though_its_folder_has_gone(tmp_path: Path) -> None:
    given = small_tokenizer(tmp_path / "given", 300)
    config = {**TINY_MODEL, "vocab_size": 300}
    manifest = manifest_of(model={"config": config}, data={"tokenizer": str(given)})
    run, said = prepare(manifest, tmp_path), (given / "tokenizer.json").read_bytes()
    given.rename(tmp_path / "gone")

    async def archive() -> Path:
        ledger, nothing = Ledger(run.folder.ledger), cast(Any, None)
        progress = RunProgress(num_stages=2, first_version=0)
        archivist = Archivist(run, nothing, ledger, progress, lambda *_: None, lambda *_: None, 3, dict, Downloads())
        starts = [StageStart(state, [], cast(Any, SimpleNamespace(digest=state_digest(state)))) for state in run.states]
        try:
            return await archivist.archive_beginning(0, starts, LeaseTable(), anchored=True, begin=lambda: None)
        finally:
            ledger.close()

    assert (asyncio.run(archive()) / "tokenizer" / "tokenizer.json").read_bytes() == said
    (tmp_path / "gone").rename(given)
    shutil.rmtree(run.folder.tokenizer)
    again = prepare(manifest, tmp_path)  # lost, it is copied again
    assert again.tokenizer is not None
    assert (again.tokenizer / "tokenizer.json").read_bytes() == said
