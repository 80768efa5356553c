"""Another cut into stages: every tensor keeps its weights and moments."""

import numpy as np

from kernels.int8_moments import num_blocks
from swarm.checkpoint.recut import recut
from swarm.checkpoint.state import Array, StageState
from swarm.model.layout import ParameterLayout
from swarm.optim.matrices import Matrices

SHAPES = {f"layers.{layer}.{name}": shape for layer in range(4) for name, shape in (("a", (5, 13)), ("b", (300,)))}


def layouts(*cuts: int) -> list[ParameterLayout]:
    """Of stages that begin at these layers."""
    stops = [*cuts[1:], 4]
    return [
        ParameterLayout.of({name: shape for name, shape in SHAPES.items() if start <= int(name.split(".")[1]) < stop})
        for start, stop in zip(cuts, stops, strict=True)
    ]


def state_of(layout: ParameterLayout, number: int, *, coded: bool) -> StageState:
    rng, size = np.random.default_rng(number), layout.num_values
    moments: dict[str, Array] = {
        "first": rng.normal(size=size).astype(np.float32),
        "second": rng.random(size).astype(np.float32),
    }
    if coded:
        codes = rng.integers(0, 256, size).astype(np.uint8)
        codes[::128] = 255  # of each block, as a step leaves it
        first = np.where(codes > 0, rng.integers(-127, 128, size), 0).astype(np.int8)
        moments = {"first": first, "second": codes, "second_scale": rng.random(num_blocks(size)).astype(np.float32)}
    weights = rng.normal(size=size).astype(np.float32)
    norms = [float(number + at) for at in range(3 + number)]
    return StageState(7, layout, weights, moments, {"beta1_power": 0.5 + number}, norms)


def test_each_tensor_keeps_weights_and_moments_and_comes_back_the_same() -> None:
    old = [state_of(layout, number, coded=False) for number, layout in enumerate(layouts(0, 2))]
    new = recut(old, layouts(0, 1, 3))
    back = recut(new, layouts(0, 2))
    for before, after in zip(old, back, strict=True):
        assert after.weights.tobytes() == before.weights.tobytes()
        assert {name: array.tobytes() for name, array in after.moments.items()} == {
            name: array.tobytes() for name, array in before.moments.items()
        }
    middle = new[1].layout.views(new[1].weights)
    assert np.array_equal(middle["layers.1.b"], old[0].layout.views(old[0].weights)["layers.1.b"])
    assert np.array_equal(middle["layers.2.a"], old[1].layout.views(old[1].weights)["layers.2.a"])
    assert [state.version for state in new] == [7, 7, 7]


def test_what_muon_does_not_turn_keeps_its_packed_second_moments() -> None:
    old = [state_of(layout, number, coded=False) for number, layout in enumerate(layouts(0, 2))]
    for state in old:
        matrices = Matrices.of(state.layout)
        assert matrices.num_packed == 2 * 300
        views = state.layout.views(state.moments["second"].astype(np.float32))
        second = np.concatenate([values for name, values in views.items() if name.endswith("b")])
        state.moments = {"momentum": state.moments["first"], "second": second}
    new = recut(old, layouts(0, 1, 3))
    assert [state.moments["second"].size for state in new] == [300, 600, 300]
    assert np.array_equal(new[1].moments["second"][:300], old[0].moments["second"][300:])
    for before, after in zip(old, recut(new, layouts(0, 2)), strict=True):
        assert {name: array.tobytes() for name, array in after.moments.items()} == {
            name: array.tobytes() for name, array in before.moments.items()
        }


def test_norms_are_spread_over_values_and_running_products_are_of_who_gives_most() -> None:
    old = [state_of(layout, number, coded=False) for number, layout in enumerate(layouts(0, 2))]
    first, middle, last = recut(old, layouts(0, 1, 3))
    assert [state.scalars["beta1_power"] for state in (first, middle, last)] == [0.5, 0.5, 1.5]
    assert np.allclose(first.certified_norms, [norm / np.sqrt(2) for norm in old[0].certified_norms])
    both = zip(old[0].certified_norms, old[1].certified_norms[-3:], strict=True)
    assert np.allclose(middle.certified_norms, [np.sqrt((one**2 + other**2) / 2) for one, other in both])


def test_moments_of_a_byte_keep_their_roots_within_a_code_and_whole_blocks_all_of_it() -> None:
    old = [state_of(layout, number, coded=True) for number, layout in enumerate(layouts(0, 2))]
    same = recut(old, layouts(0, 2))
    for before, after in zip(old, same, strict=True):
        assert after.moments["second"].tobytes() == before.moments["second"].tobytes()
        assert after.moments["first"].tobytes() == before.moments["first"].tobytes()
    for state in recut(old, layouts(0, 1, 3)):
        scale = np.repeat(state.moments["second_scale"], 128)[: state.layout.num_values]
        roots = state.moments["second"].astype(np.float32) ** 2 * scale
        wanted = {name: root for before in old for name, root in before.layout.views(_roots(before)).items()}
        steps = state.layout.views(scale)
        for name, found in state.layout.views(roots).items():  # half a code, as codes lie at that root
            was, step = wanted[name], steps[name]
            assert (np.abs(found - was) <= step * (np.sqrt(was / step) + 0.5)).all(), name
        assert not state.moments["first"][state.moments["second"] == 0].any()


def _roots(state: StageState) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    scale = np.repeat(state.moments["second_scale"], 128)[: state.layout.num_values]
    return (state.moments["second"].astype(np.float32) ** 2 * scale).astype(np.float32)
