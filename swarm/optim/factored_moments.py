"""Second moments said in few numbers: of each matrix the means of its rows and of its columns, all else as it is.

A value is its row's mean times its column's over the mean of all (Shazeer, Stern, "Adafactor", 2018). At a width of
2048 that is a thousandth of the values. The means of several members' means are the means of their mean.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kernels import windows
from kernels.threads import ONE_THREAD, Threads
from swarm.model.layout import ParameterLayout

Floats = NDArray[np.float32]


def num_means(layout: ParameterLayout) -> int:
    """Values of what `means_of` makes."""
    return sum(sum(shape) if len(shape) == 2 else size for shape, size in zip(layout.shapes, layout.sizes, strict=True))


def means_of(second: Floats, layout: ParameterLayout, *, threads: Threads = ONE_THREAD) -> Floats:
    """Tensor by tensor: a matrix' rows' means and then its columns', the values of any other."""
    out = np.empty(num_means(layout), dtype=np.float32)
    for view, means in _tensors(second, out, layout):
        if view.ndim == 2:
            windows.means(view, means[: len(view)], means[len(view) :], threads=threads)
        else:
            means[:] = view.reshape(-1)
    return out


def from_means(means: Floats, layout: ParameterLayout, out: Floats, *, threads: Threads = ONE_THREAD) -> None:
    """Write second moments that have these means to `out`; they are not negative where no mean is."""
    for view, of_view in _tensors(out, means, layout):
        if view.ndim == 2:
            windows.product_of_means(of_view[: len(view)], of_view[len(view) :], view, threads=threads)
        else:
            view.reshape(-1)[:] = of_view


def _tensors(second: Floats, means: Floats, layout: ParameterLayout) -> Iterator[tuple[Floats, Floats]]:
    assert means.size == num_means(layout), f"{means.size} means of {num_means(layout)}"
    start = 0
    for view in layout.views(second).values():
        stop = start + (sum(view.shape) if view.ndim == 2 else view.size)
        yield view, means[start:stop]
        start = stop
