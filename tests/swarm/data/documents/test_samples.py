"""Documents packed whole into samples: none is lost, none is torn, and little is padding."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from swarm.core.pipeline.targets import DOCUMENT_BEGINS, IGNORED_TARGET, most_documents
from swarm.data.documents.marks import Marks
from swarm.data.documents.samples import DocumentWriter
from swarm.data.token_file import TokenFile, TokenWriter
from verification.pipeline.headers import document_bounds

LENGTH = 64
MARKS = Marks(documents=True, answers=False)


def _written(path: Path, documents: list[list[int]], marks: Marks = MARKS) -> tuple[np.ndarray, int]:
    with TokenWriter(path, 4) as file:
        writer = DocumentWriter(file, marks, LENGTH, padding=9)
        count = sum(writer.write(marks.values(np.array(one))) for one in documents)
        writer.flush()
    tokens = TokenFile(path, 4)
    return tokens.read(0, len(tokens)).reshape(-1, LENGTH), count


@pytest.mark.parametrize("longest", [12, 60, 300])
def test_every_document_is_there_whole_in_samples_that_are_full(tmp_path: Path, longest: int) -> None:
    rng = np.random.default_rng(longest)
    lengths = rng.integers(2, longest, 3000)
    documents = [rng.integers(100, 1000, length).tolist() for length in lengths]
    values_BL, count = _written(tmp_path / "t", documents)
    tokens_BL, targets_BL = MARKS.batch(values_BL)
    bounds = [0, *document_bounds(targets_BL), *range(0, tokens_BL.size, LENGTH), tokens_BL.size]
    edges = sorted(set(bounds))
    found = [tuple(tokens_BL.flat[start:stop]) for start, stop in pairwise(edges)]
    pieces = [tuple(one[at : at + LENGTH]) for one in documents for at in range(0, len(one), LENGTH)]
    wanted = [piece for piece in pieces if len(piece) > 1]
    assert sorted(one for one in found if 9 not in one) == sorted(wanted)
    assert count == (targets_BL >= 0).sum() == sum(len(piece) - 1 for piece in wanted)
    assert (tokens_BL == 9).mean() < 0.03
    assert max((targets_BL == DOCUMENT_BEGINS).sum(axis=1)) < LENGTH
    again, _ = _written(tmp_path / "again", documents)
    np.testing.assert_array_equal(values_BL, again)


def test_a_sample_holds_no_more_documents_than_a_record_can_name(tmp_path: Path) -> None:
    many = 2 * LENGTH
    writer_length = 4096
    with TokenWriter(tmp_path / "t", 4) as file:
        writer = DocumentWriter(file, MARKS, writer_length, padding=9)
        for _ in range(40 * many):
            writer.write(MARKS.values(np.array([1, 2])))
        writer.flush()
    tokens = TokenFile(tmp_path / "t", 4)
    _, targets_BL = MARKS.batch(tokens.read(0, len(tokens)).reshape(-1, writer_length))
    assert all(len(document_bounds(row[None])) < most_documents(writer_length) for row in targets_BL)


def test_marks_say_what_is_a_target() -> None:
    marks = Marks(documents=True, answers=True)
    first = marks.values(np.array([5, 6, 7]), np.array([True, False, True]))
    second = marks.values(np.array([8, 9]), np.array([False, True]))
    values = np.concatenate([first, second, marks.padding(2, 0)])
    tokens_BL, targets_BL = marks.batch(values[None])
    assert tokens_BL.tolist() == [[5, 6, 7, 8, 9, 0, 0]]
    other = DOCUMENT_BEGINS
    assert targets_BL.tolist() == [[IGNORED_TARGET, 7, other, 9, other, other, IGNORED_TARGET]]
    assert document_bounds(targets_BL) == (3, 5)
    assert marks.learnt(values).sum() == 2


def test_without_marks_tokens_are_ids() -> None:
    marks = Marks(documents=False, answers=False)
    tokens_BL, targets_BL = marks.batch(np.arange(10).reshape(2, 5))
    assert (tokens_BL.tolist(), targets_BL.tolist()) == ([[0, 1, 2, 3], [5, 6, 7, 8]], [[1, 2, 3, 4], [6, 7, 8, 9]])
