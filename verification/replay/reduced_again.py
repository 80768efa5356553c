"""A part aggregated again from the inputs that its reducer signed for."""

from collections.abc import Sequence

from swarm.averaging.parts import Parts
from swarm.averaging.reduce import reduce_part
from swarm.averaging.seeds import reduced_seed
from swarm.core.ids import Version
from swarm.core.round.words import Reduction
from swarm.core.settings import RunSettings
from verification.round.papers import Bytes


def digest_again(made: Reduction, bodies: Sequence[Bytes], settings: RunSettings, parts: Parts) -> bytes:
    """The BLAKE3 that an honest reducer signs; `bodies` are the inputs' encoded parts, `parts` the stage's."""
    return reduce_part(
        made.level,
        parts.codec_name(made.part),
        parts.size(made.part),
        [(one.num_tokens, body) for one, body in zip(made.inputs, bodies, strict=True)],
        rule=settings.averaging.reduction,
        norm_cap=parts.norm_cap(made.part, made.norm_cap),
        seed=reduced_seed(made.run_id, made.stage, Version(made.step), made.part),
    ).digest
