"""Muon's turn of a matrix: beside the iteration in fp64, and beside torch's own; the same bits however it is shared."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.optim import Muon

from kernels import orthogonal
from kernels.norms import tree_norm
from kernels.threads import Threads

SHAPES = [(64, 64), (33, 70), (130, 47), (1, 50), (5, 1), (300, 2100)]
Floats = NDArray[np.float32]


def matrix_of(shape: tuple[int, int], smallest: float = 1e-3) -> Floats:
    """With singular values from 1e-4 down to `smallest` of that."""
    rng = np.random.default_rng(shape[0])
    left, values, right = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return (left * np.geomspace(1e-4, 1e-4 * smallest, values.size) @ right).astype(np.float32)


def in_fp64(matrix: Floats) -> NDArray[np.float64]:
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    values /= np.linalg.norm(values)
    for _ in range(orthogonal.NUM_ITERATIONS):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    turned: NDArray[np.float64] = left * values @ right
    return turned


def of_torch(matrix: Floats) -> Floats:
    """torch's first update without momentum, of a weight that it is taken from."""
    weight = torch.nn.Parameter(torch.zeros(matrix.shape))
    weight.grad = torch.from_numpy(matrix)
    Muon([weight], lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    update: Floats = -weight.detach().numpy() / np.float32(0.2 * np.sqrt(max(matrix.shape)))
    return update


def distance(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("shape", [*SHAPES[:-1], pytest.param(SHAPES[-1], marks=pytest.mark.soak)])
def test_a_matrix_is_turned_as_in_fp64_and_more_nearly_so_than_by_torch(shape: tuple[int, int]) -> None:
    matrix = matrix_of(shape)
    before = matrix.tobytes()
    turned = orthogonal.turned(matrix, tree_norm(matrix.reshape(-1)))
    wanted = in_fp64(matrix)
    assert distance(turned, wanted) < 2e-3
    assert distance(turned, wanted) < 0.2 * distance(of_torch(matrix), wanted) < 0.1
    assert matrix.tobytes() == before


def test_bits_do_not_depend_on_threads() -> None:
    matrix = matrix_of((300, 2100))
    norm = tree_norm(matrix.reshape(-1))
    found = {orthogonal.turned(matrix, norm, threads=Threads(count)).tobytes() for count in (1, 2, 5)}
    assert len(found) == 1


def test_sums_of_products_are_exact_though_they_wrap_on_the_way() -> None:
    rng = np.random.default_rng(1)
    left = rng.integers(-400, 401, (8, 5000)).astype(np.int16)
    right = rng.integers(-400, 401, (12, 5000)).astype(np.int16)
    left[0], left[0, :6], right[0], right[0, :6] = 0, 32000, 0, [*[32000] * 3, *[-32000] * 3]
    left[1], right[1] = 453, 452
    wanted = left.astype(np.int64) @ right.astype(np.int64).T
    assert np.abs(wanted).max() < 2**31 < 3 * 32000**2
    sums = np.empty(wanted.shape, dtype=np.int32)
    orthogonal._sum_products(left, right, 0, sums)
    assert sums.tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", ["one value", "one row", "one column", "equal rows", "zeros", "nearly zeros"])
def test_matrices_of_rank_one_or_none_stay_finite(kind: str) -> None:
    matrix = np.zeros((40, 60), dtype=np.float32)
    if kind == "one value":
        matrix[3, 5] = -2.0
    elif kind == "one row":
        matrix[7] = 1e-3
    elif kind == "one column":
        matrix[:, 9] = 1e3
    elif kind == "equal rows":
        matrix[:] = np.linspace(-1, 1, 60, dtype=np.float32)
    elif kind == "nearly zeros":
        matrix[1, 1] = 1e-9
    turned = orthogonal.turned(matrix, tree_norm(matrix.reshape(-1)))
    if "zeros" in kind:
        assert not turned.any()
        return
    values = np.linalg.svd(turned, compute_uv=False)
    assert 0.6 < values[0] < 1.25
    assert values[1] < 0.05
    assert distance(turned, in_fp64(matrix)) < 2e-3
