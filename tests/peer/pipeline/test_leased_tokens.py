"""A source holds the tokens of its leases, in advance, and little else."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pytest
from pyarrow import parquet

from peer.pipeline import leased_tokens
from peer.pipeline.leased_tokens import LeasedTokens, spare_pieces
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.plan import SPARE_TOKEN_BYTES
from swarm.core.settings import DataSettings
from swarm.data.batches import BatchReader
from swarm.data.piece_store import PieceFolder, WholeFile
from swarm.data.pieces import PIECE_BYTES, PieceList, list_pieces
from swarm.data.token_file import TokenFile
from tests.swarm_in_process import manifest_of, prepare, swarm_in_process


def test_two_leased_chunks_of_a_set_of_2_gb_and_what_is_spare_are_less_than_a_twentieth() -> None:
    """2 GB of text are 0.93 GB of tokens of two bytes."""
    num_tokens = 465_000_000
    pieces = PieceList(2 * num_tokens, bytes(32 * (2 * num_tokens // PIECE_BYTES + 1)))
    order = DataOrder(num_tokens, 2048, 8, (16 << 20) // 2, seed=0)
    me = PeerId("me")
    table = LeaseTable()
    for _ in range(20):
        table = table.advance(consumed=table.ids_of(me)[:64], members=[me], order=order, ids_each=128)
        held = {
            piece
            for chunk in table.open_chunks
            for start, stop in order.slices_of_chunk(chunk.position)
            for piece in range(2 * start // PIECE_BYTES, (2 * stop - 1) // PIECE_BYTES + 1)
        }
        assert len(held) <= 16 * len(table.open_chunks), "a slice is a piece"
        assert len(held) + 2 * spare_pieces(pieces) < len(pieces) / 20
    assert 2 * spare_pieces(PieceList(1 << 37, b"")) * PIECE_BYTES == SPARE_TOKEN_BYTES


class Files:
    """Pieces from a whole file at once; counts what was asked for."""

    def __init__(self, settings: Any, whole: WholeFile) -> None:
        self.settings = settings
        self.fetched: list[int] = []
        self._whole = whole

    async def fetch(self, file: Any, wanted: Sequence[int]) -> None:
        for index in wanted:
            if index not in file.folder:
                self.fetched.append(index)
                file.folder.put(index, self._whole.piece(index) or b"")


def test_leases_come_first_then_what_is_ahead_and_the_rest_goes(tmp_path: Path) -> None:
    size, chunk = 40 * PIECE_BYTES, 4 * PIECE_BYTES
    (tmp_path / "t.tokens").write_bytes(bytes(range(251)) * (size // 251 + 1))
    with (tmp_path / "t.tokens").open("r+b") as file:
        file.truncate(size)
    pieces = list_pieces(tmp_path / "t.tokens")
    settings = cast(
        Any,
        SimpleNamespace(
            data=DataSettings(
                tokenizer="bytes",
                vocab_size=256,
                token_bytes=1,
                train_digest=bytes(32),
                held_out_digest=bytes(32),
                num_train_tokens=size,
                sequence_length=PIECE_BYTES // 4 - 1,
                chunk_tokens=chunk,
                seed=1,
                mixture=(),
                num_held_out_tokens=1000,
            ),
            batch=SimpleNamespace(microbatch_size=1),
            audits=SimpleNamespace(retained_versions=4),
            replays=True,
        ),
    )
    order = DataOrder.of_run(settings)
    members = [PeerId("a"), PeerId("b")]
    table = LeaseTable().advance(consumed=(), members=members, order=order, ids_each=3)
    steps = cast(
        Any,
        SimpleNamespace(
            context=SimpleNamespace(me=PeerId("b")),
            chain=SimpleNamespace(leases=table, members=tuple(members)),
            version=0,
        ),
    )
    files = Files(settings, WholeFile(tmp_path / "t.tokens", pieces))
    folder = PieceFolder(tmp_path / "held", pieces, 1)
    held = cast(Any, SimpleNamespace(folder=folder))
    held_out = cast(Any, SimpleNamespace(folder=PieceFolder(tmp_path / "held out", pieces, 1)))
    tokens = LeasedTokens(cast(Any, files), held, held_out, steps)

    async def until_still() -> None:
        running = asyncio.ensure_future(tokens.run())
        await asyncio.sleep(0)  # it begins with what it forgets
        async with asyncio.timeout(60.0):
            while any(tokens._due()):  # noqa: ASYNC110 - it tells nobody that it has all
                await asyncio.sleep(0.01)
        running.cancel()

    async def scenario() -> None:
        await until_still()
        leased = tokens._leased()
        assert files.fetched[: len(leased)] == leased
        assert set(files.fetched) == {*leased, *tokens._ahead()}
        assert len(folder.held()) < 40 // 2
        # A microbatch of somebody else's is fetched where it is asked for, and is what everybody reads there.
        other = MicrobatchId(30 * order.microbatches_per_chunk)
        whole = BatchReader(settings, TokenFile(tmp_path / "t.tokens", 1))
        batch = await tokens.batch(other)
        assert (batch[0] == whole.batch(other)[0]).all()
        # What was computed from is kept while it may have to be shown.
        mine = table.ids_of(PeerId("b"))[0]
        await tokens.batch(mine, born_for=cast(Any, 0))
        steps.chain = SimpleNamespace(
            leases=LeaseTable(next_chunk=9).advance(consumed=(), members=members, order=order, ids_each=3),
            members=tuple(members),
        )
        used = set(tokens._of_chunks([order.chunk_of(mine)]))
        steps.version = 5
        await until_still()
        assert used <= set(folder.held())
        steps.version = 50
        await until_still()
        assert len(folder.held()) <= len({*tokens._leased(), *tokens._ahead()}) + tokens._spare

    asyncio.run(scenario())


def test_a_mixture_of_parquet_files_is_trained_on_by_peers_that_hold_what_they_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members of stage 0, and 24 MB of text in two sources: order and mixture are the host's for both."""
    monkeypatch.setattr(leased_tokens, "LEAST_SPARE", 1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        texts = [f"{name} {number} " * 4000 for number in range(300)]
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name / "a.parquet")
    mixture = [{"text": ["one"], "weight": 3}, {"text": ["two"], "weight": 1}]
    manifest = manifest_of(
        data={"text": None, "mixture": mixture, "chunk_tokens": 2 * PIECE_BYTES, "sequence_length": 64},
        batch={"microbatch_size": 8, "target_tokens": 1024},
        limits={"founders_per_stage": 2},
        optimizer={"total_steps": 100},
    ).replace(json.dumps("text.txt"), "")
    settings = prepare(manifest, tmp_path).settings
    assert [weight for _, _, weight in settings.data.mixture] == [3, 1]

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2)) as swarm:
            await swarm.until_version(3)
            orders = []
            for peer in swarm.of_stage(0):
                assert peer.daemon.at is not None
                tokens = peer.daemon.at.tokens
                assert tokens is not None
                orders.append(tokens.order)
                held, whole = len(tokens._train.folder.held()), len(tokens._train.folder.pieces)
                assert 0 < held < whole
            assert orders == [DataOrder.of_run(settings)] * 2

    asyncio.run(scenario())
