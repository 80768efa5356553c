"""What is compared: ways for several members to train one model, and one member alone."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

MomentForm: TypeAlias = Literal[
    "private",
    "reset",
    "reset_nobc",
    "vfac_nobc",
    "v4_nobc",
    "averaged",
    "averaged4",
    "m4_vfac",
    "m2_vfac",
    "delta_vfac",
]
DeltaCodec: TypeAlias = Literal["fp32", "int4", "int2"]

BYTES_OF_DELTA: dict[DeltaCodec, float] = {
    "fp32": 4.0,
    "int4": 0.5 + 2 / 64,
    "int2": 0.25 + 2 / 64,
}
"""A value, with a bf16 scale for each 64."""
BYTES_OF_MOMENTS: dict[MomentForm, float] = {
    "private": 0.0,
    "reset": 0.0,
    "reset_nobc": 0.0,
    "vfac_nobc": 0.0,
    "v4_nobc": 0.5 + 2 / 64,
    "averaged": 8.0,
    "averaged4": 1.0 + 4 / 64,
    "m4_vfac": 0.5 + 2 / 64,
    "m2_vfac": 0.25 + 2 / 64,
    "delta_vfac": 0.0,
}
"""A value, one way; rows' and columns' means are left out: 4 (1 / rows + 1 / columns), 0.004 at width 2048."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How members train together."""

    local_steps: int
    """H; 1 is synchronous: one step on the mean gradient of all members."""
    moments: MomentForm = "private"
    codec: DeltaCodec = "fp32"
    """Of pseudo-gradients and of results."""
    delay: int = 0
    moments_of: Literal["certified", "own"] = "certified"
    """Under delay 1, what a window's moments come from: the last certified round, or the member's own last window."""
    rule: Literal["mean", "centered_clip"] = "mean"
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    """Nesterov's, of the outer step."""

    @property
    def name(self) -> str:
        """Unique: every field that is not its default is in it."""
        if self.local_steps == 1:
            return "synchronous"
        words = [f"H{self.local_steps}", self.moments, self.codec]
        words += ["delay" if self.moments_of == "certified" else "delay-own"] if self.delay else []
        words += [self.rule] if self.rule != "mean" else []
        words += [f"a{self.outer_rate:g}"] if self.outer_rate != 1.0 else []
        words += [f"n{self.outer_momentum:g}"] if self.outer_momentum else []
        return "-".join(words)

    @property
    def bytes_up(self) -> float:
        """A parameter and window: contribution and result, where members are so many that each sends nearly both."""
        return 2 * (BYTES_OF_DELTA[self.codec] + BYTES_OF_MOMENTS[self.moments])


def parse_method(name: str) -> Method:
    """The method of that name. Raises ValueError for a name that none has."""
    if name == "synchronous":
        return Method(local_steps=1)
    words = name.split("-")
    try:
        method = Method(local_steps=int(words[0].removeprefix("H")), moments=words[1], codec=words[2])  # type: ignore[arg-type]
        for word in _options("-".join(words[3:])):
            if word in ("delay", "delay-own"):
                method = replace(method, delay=1, moments_of="certified" if word == "delay" else "own")
            elif word == "centered_clip":
                method = replace(method, rule="centered_clip")
            elif word.startswith("n"):
                method = replace(method, outer_momentum=float(word[1:]))
            else:
                method = replace(method, outer_rate=float(word.removeprefix("a")))
    except (IndexError, ValueError) as error:
        raise ValueError(f"{name}: no method; one is H30-averaged-int4 or H10-vfac_nobc-fp32-delay") from error
    if method.name != name or method.codec not in BYTES_OF_DELTA or method.moments not in BYTES_OF_MOMENTS:
        raise ValueError(f"{name}: no method; one is H30-averaged-int4 or H10-vfac_nobc-fp32-delay")
    return method


def _options(text: str) -> list[str]:
    return text.replace("delay-own", "delay_own").replace("-", " ").replace("delay_own", "delay-own").split()
