"""How much of a microbatch a peer computes at once, so that it fits into its memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from swarm.core.settings import RunSettings


@dataclass(frozen=True)
class ComputeMode:
    """What a peer holds while it computes; what comes out is the same, up to the order of sums over samples."""

    samples_at_once: int
    """Of a microbatch. With fewer than all, `recompute` is on."""
    recompute: bool
    """Keep the input alone until backward, and compute forward again then."""
    steps_there: bool = True
    """A window's weights and moments lie on the device of its stage, and it steps there."""

    @classmethod
    def of_run(cls, settings: RunSettings) -> "ComputeMode":
        """A microbatch at once, as the run's settings have it."""
        return cls(settings.batch.microbatch_size, settings.model.recompute)


def modes(settings: RunSettings) -> Iterator[ComputeMode]:
    """All that a peer of the run may choose from: the quickest first, each next one needs less memory."""
    wanted = ComputeMode.of_run(settings)
    yield wanted
    if settings.has_windows:
        wanted = replace(wanted, steps_there=False)
        yield wanted
    if not wanted.recompute:
        wanted = replace(wanted, recompute=True)
        yield wanted
    while wanted.samples_at_once > 1:
        wanted = replace(wanted, samples_at_once=(wanted.samples_at_once + 1) // 2)
        yield wanted
