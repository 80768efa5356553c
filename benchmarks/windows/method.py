"""What is compared: windows of local steps, synchronous steps, and one member alone."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from swarm.core.settings import BYTES_A_VALUE, AveragingCodecName

Rule: TypeAlias = Literal["mean", "centered_clip"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How members train together."""

    local_steps: int
    """H; 1 is synchronous: one step on the mean gradient of all members, in fp32."""
    codec: AveragingCodecName = "fp32"
    """Of pseudo-gradients, first moments and results."""
    rule: Rule = "mean"
    overlap: int = 0
    """So many inner steps of the next window are taken while a round goes on, from where the member itself has come to,
    as with `averaging.delay = 1`: of what all have done weights take the place of its own evenly over the first half of
    them, moments in the end."""

    @property
    def name(self) -> str:
        """Unique: every field that is not its default is in it."""
        if self.local_steps == 1:
            return "synchronous"
        overlap = [f"overlap{self.overlap}"] if self.overlap else []
        return "-".join([f"H{self.local_steps}", self.codec, *([self.rule] if self.rule != "mean" else []), *overlap])

    @property
    def bytes_up(self) -> float:
        """A parameter and window: contribution and result, where members are so many that each sends nearly both. Rows'
        and columns' means are left out: 4 (1 / rows + 1 / columns), 0.004 at width 2048."""
        return 8.0 if self.local_steps == 1 else 2 * 2 * BYTES_A_VALUE[self.codec]


def parse_method(name: str) -> Method:
    """The method of that name. Raises ValueError for a name that none has."""
    if name == "synchronous":
        return Method(local_steps=1)
    plain, _, overlapping = name.partition("-overlap")
    words = plain.split("-")
    try:
        steps, codec, rule = int(words[0].removeprefix("H")), words[1], words[2] if len(words) > 2 else "mean"
        overlap = int(overlapping or 0)
        method = Method(local_steps=steps, codec=codec, rule=rule, overlap=overlap)  # type: ignore[arg-type]
    except (IndexError, ValueError) as error:
        raise ValueError(f"{name}: no method; one is H10-int2 or H30-int4-centered_clip") from error
    if (
        method.name != name
        or codec not in get_args(AveragingCodecName)
        or rule not in get_args(Rule)
        or codec == "topk"
    ):
        raise ValueError(f"{name}: no method; one is H10-int2 or H30-int4-centered_clip")
    return method
