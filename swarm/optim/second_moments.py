"""AdamW's second moments as numbers, whatever they are kept as; those of an older version, from above."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.int8_moments import BLOCK_VALUES
from swarm.core.settings import OptimizerSettings
from swarm.optim.matrices import are_of_muon

Floats = NDArray[np.float32]


def second_moments(
    settings: OptimizerSettings, moments: Mapping[str, NDArray[Any]], *, steps_since: int = 0
) -> Floats | None:
    """One for each value; None where the optimizer has none, or not of all values, or nothing can be said any more.

    `steps_since`: the moments are of so many steps after the version that is meant, and what is returned is at least
    that version's. A step leaves `beta2` of a second moment and adds squares; in codes of a byte it may round one code
    down.
    """
    if "second" not in moments or are_of_muon(moments):
        return None
    kept = settings.beta2**steps_since
    if kept < np.finfo(np.float32).tiny:
        return None
    second = moments["second"]
    if "second_scale" in moments:
        roots = np.square(second.astype(np.float32) + np.float32(steps_since))
        roots *= np.repeat(moments["second_scale"], BLOCK_VALUES)[: roots.size]
        second = np.square(roots)
    found: Floats = second if steps_since == 0 else np.divide(second, np.float32(kept), dtype=np.float32)
    return found
