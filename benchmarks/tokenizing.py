"""How fast a set of Parquet files becomes token files, how little of them a peer of the first stage holds, and whether
it reads of that what its host reads of all.

    python -m benchmarks.tokenizing --json

The set is made of the Python sources that are installed here, again and again until it is large enough, and of as many
files; the tokenizer is byte-level BPE trained on some of them. Rates are of text in bytes. "Distinct" is the share of
the set that is not a repetition; half of the files are one source of a mixture with weight 3, the others one with 1.
"Library" is one thread of `tokenizers` on some of the same text, one by one. "Same order" is whether microbatches drawn
from two laps are the same for the host and for a peer that has the signed settings and the pieces of these alone.
`--masked` packs documents whole into samples, apart from each other. `--smoke` takes a few files and two MB.
"""

import json
import os
import random
import resource
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

FILE_BYTES = 64 << 20
LIBRARY_BYTES = 4 << 20
SMOKE_FILES = 50


@click.command()
@click.option("--megabytes", default=2000, show_default=True, help="Of text.")
@click.option("--masked", is_flag=True, help="Documents whole in samples.")
@click.option("--smoke", is_flag=True, help="Two megabytes, to see that it runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(megabytes: int, masked: bool, smoke: bool, as_json: bool) -> None:
    """Tokenize a set of Parquet files."""
    with tempfile.TemporaryDirectory() as folder:
        texts = sources(SMOKE_FILES if smoke else None)
        figures = measured(Path(folder), texts, (2 if smoke else megabytes) * 10**6, masked=masked)
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


def measured(folder: Path, texts: list[str], size_bytes: int, *, masked: bool) -> dict[str, Any]:
    """The figures, of a set of so many bytes that is made of these texts."""
    from swarm.data.tokenizer import load_tokenizer

    tokenizer = trained_tokenizer(folder / "tokenizer", texts)
    written = write_set(folder / "set", texts, size_bytes)
    some, count = list[str](), 0
    while count < min(LIBRARY_BYTES, size_bytes):
        some.append(texts[len(some) % len(texts)])
        count += len(some[-1].encode())
    library, began = load_tokenizer(str(tokenizer)), time.process_time()
    for text in some:
        library._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    alone = count / (time.process_time() - began)
    began, used = time.perf_counter(), cpu_s()
    prepared, settings = prepare(folder, tokenizer, masked=masked)
    seconds, cpu = time.perf_counter() - began, cpu_s() - used
    from peer.pipeline.leased_tokens import spare_pieces
    from swarm.core.pipeline.data_order import DataOrder
    from swarm.data.pieces import PIECE_BYTES

    order, pieces = DataOrder.of_run(settings), prepared.pieces()[prepared.train_path]
    size = prepared.token_bytes
    held = {
        piece
        for position in range(2)
        for start, stop in order.slices_of_chunk(position)
        for piece in range(start * size // PIECE_BYTES, (stop * size - 1) // PIECE_BYTES + 1)
    }
    first = prepared.mixture[1].first_token
    drawn = [start for position in range(40) for start, _ in order.slices_of_chunk(position)]
    return {
        "text_mb": round(written / 1e6, 1),
        "distinct": round(min(1.0, sum(len(text.encode()) for text in texts) / written), 3),
        "tokens": prepared.num_train_tokens + prepared.num_held_out_tokens,
        "mb_per_s": round(written / 1e6 / seconds, 2),
        "mb_per_cpu_s": round(written / 1e6 / cpu, 2),
        "library_mb_per_cpu_s": round(alone / 1e6, 2),
        "cores": os.cpu_count(),
        "share_of_the_first_source": round(sum(start < first for start in drawn) / len(drawn), 3),
        "same_order": is_same_for_a_peer(folder / "peer", prepared, settings),
        "held_share_of_a_peer": round(min(1.0, (len(held) + 2 * spare_pieces(pieces)) / len(pieces)), 4),
    }


def is_same_for_a_peer(folder: Path, prepared: Any, settings: Any) -> bool:
    """Whether a peer that begins, or begins again, reads the microbatches that the host reads."""
    from swarm.core.canonical import unpack
    from swarm.data.batches import BatchReader
    from swarm.data.piece_store import PieceFolder, WholeFile
    from swarm.manifest.value import settings_bytes, settings_from_value

    hosts, pieces = BatchReader(settings, prepared.train()), prepared.pieces()[prepared.train_path]
    whole, laps = WholeFile(prepared.train_path, pieces), 2 * hosts.order.microbatches_per_lap
    drawn = [random.Random(0).randrange(laps) for _ in range(20)]
    for _ in range(2):  # the second finds the pieces on its disk
        known = settings_from_value(unpack(settings_bytes(settings), max_bytes=1 << 24))
        held = PieceFolder(folder, pieces, prepared.token_bytes)
        reader = BatchReader(known, held)
        for number in drawn:
            for index in {index for run in reader.order.runs(number) for index in held.of_tokens(*run)}:
                if index not in held:
                    held.put(index, whole.piece(index) or b"")
            if any((mine != his).any() for mine, his in zip(reader.batch(number), hosts.batch(number), strict=True)):
                return False
    return True


def cpu_s() -> float:
    """Of this process and of those that it began and that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def sources(most: int | None) -> list[str]:
    """Texts, in no order of theirs; at most so many."""
    paths = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py")
    )
    random.Random(0).shuffle(paths)
    texts = (path.read_text(encoding="utf-8", errors="ignore").replace("\0", "") for path in paths[:most])
    return [text for text in dict.fromkeys(texts) if text]


def trained_tokenizer(folder: Path, texts: list[str]) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:200], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def write_set(folder: Path, texts: list[str], size_bytes: int) -> int:
    """Bytes of text written."""
    import pyarrow
    from pyarrow import parquet

    for source in range(2):
        (folder / str(source)).mkdir(parents=True)
    written = 0
    for number, rows in enumerate(_files(texts, size_bytes)):
        parquet.write_table(
            pyarrow.table({"text": rows}), folder / str(number % 2) / f"{number:04d}.parquet", compression="zstd"
        )
        written += sum(len(row.encode()) for row in rows)
    return written


def _files(texts: list[str], size_bytes: int) -> Iterator[list[str]]:
    rows, of_file, at, half = list[str](), 0, 0, size_bytes // 2
    while size_bytes > 0:
        text = texts[at % len(texts)]
        at += 1
        rows.append(text)
        of_file += len(text)
        size_bytes -= len(text)
        if of_file >= min(FILE_BYTES, half) or size_bytes <= 0:
            yield rows
            rows, of_file = [], 0


def prepare(folder: Path, tokenizer: Path, *, masked: bool) -> tuple[Any, Any]:
    """What `swarm host` prepares of it, and the run's settings."""
    from swarm.data.prepare import prepare_data
    from swarm.manifest.file import freeze, parse_manifest

    mixture = "[{text = ['set/0'], weight = 3}, {text = ['set/1'], weight = 1}]"
    text = f"[data]\nmixture = {mixture}\ntokenizer = '{tokenizer}'\nsequence_length = 128\n"
    text += "documents = 'masked'\n" if masked else ""
    manifest = parse_manifest(text, folder / "run.toml")
    prepared = prepare_data(manifest.data, folder / "data", lambda said: None)
    return prepared, freeze(manifest, prepared, ())


if __name__ == "__main__":
    main()
