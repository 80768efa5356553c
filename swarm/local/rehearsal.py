"""A run's kernels called once, before time counts: the first call on a machine compiles them.

That takes seconds for each; in the midst of a step the others would take a peer for dead.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.averaging.activations import activation_codec
from swarm.averaging.aggregate import aggregate
from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded import SEED_BYTES
from swarm.averaging.encoded_mean import check_encoded
from swarm.averaging.error_feedback import Residual
from swarm.averaging.reduce import reduce_part
from swarm.core.settings import RunSettings
from swarm.model.layout import ParameterLayout
from swarm.optim.carried_moments import CarriedMoments
from swarm.optim.exact import ExactOptimizer, extrapolated
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.local_window import LocalWindow

NUM_VALUES = 256


def rehearse(settings: RunSettings) -> None:
    """Call every kernel that a peer of this run may call, with arrays of the kinds it will see."""
    for name in {settings.codecs.activations, settings.codecs.activation_gradients}:
        activations = activation_codec(name)
        shape = (1, 2, NUM_VALUES)
        said = activations.encode(torch.linspace(-1, 1, 2 * NUM_VALUES).reshape(shape))
        activations.laid(activations.decode(said, shape).numpy(), said)
        activations.cells(said, said, shape)
    gradient = GradientSum(NUM_VALUES)
    gradient.flat.fill_(1.0)
    gradient.add_tokens(1)
    values = gradient.take_mean()
    averaging = settings.codecs.averaging
    for codec in (vector_codec(averaging), result_codec(averaging)):
        body = codec.encode(values, seed=bytes(SEED_BYTES))
        codec.decode(body, np.empty_like(values))
        check_encoded(codec, body, num_values=values.size)
        codec.sum_of_squares(body, values.size)
    if settings.leaves_residual:
        whole, seed = slice(0, values.size), bytes(SEED_BYTES)
        Residual(values.size).encode(values.__getitem__, vector_codec(averaging), parts=[whole], seeds=[seed])
    hostile = values * np.float32(-9.0)
    for contributions in ([values, values], [values, values * np.float32(0.5), hostile]):
        aggregate(contributions, [1] * len(contributions), rule=settings.averaging.reduction, norm_cap=1.0)
    quotients = vector_codec(averaging).encode_quotients(values, np.float32(3.0), seed=bytes(SEED_BYTES))
    rule = settings.averaging.reduction
    reduce_part("all", averaging, values.size, [(1, quotients)], rule=rule, norm_cap=None, seed=bytes(SEED_BYTES))
    _rehearse_steps(settings, values)
    if settings.has_windows:
        _rehearse_window(settings, values)


def _rehearse_window(settings: RunSettings, gradient: NDArray[np.float32]) -> None:
    layout = ParameterLayout.of({"matrix": (2, NUM_VALUES // 2)})
    carried, window = CarriedMoments(settings, layout), LocalWindow(settings, layout)
    window.begin(np.ones_like(gradient), 0, carried.at_first())
    window.take_mean(gradient)
    window.end()
    said = []
    for part, where in enumerate(carried.parts):
        said.append(carried.parts.contribution_codec(part).encode(window.values(where), seed=bytes(SEED_BYTES)))
    after = carried.after(carried.at_first(), [said[part] for part in carried.parts.moments])
    window.begin(np.ones_like(gradient), 1, after)


def _rehearse_steps(settings: RunSettings, gradient: NDArray[np.float32]) -> None:
    """Two steps: a stage's first weights may be written to, those that a step made may not."""
    layout = ParameterLayout.of({"layers.0.matrix": (8, NUM_VALUES // 16), "vector": (NUM_VALUES // 2,)})
    optimizer = ExactOptimizer.of(settings.optimizer, layout)
    old = np.ones(NUM_VALUES, dtype=np.float32)
    new = np.empty_like(old)
    optimizer.step(old, gradient, step=0, clip_norm=1.0, out=new)
    new.setflags(write=False)
    newer = np.empty_like(old)
    optimizer.step(new, gradient, step=1, clip_norm=1.0, out=newer)
    if settings.optimizer.correction == "extrapolate":
        newer.setflags(write=False)
        extrapolated(newer, new, np.empty_like(old))
