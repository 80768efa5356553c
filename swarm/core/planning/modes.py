"""The modes of training that a fleet may choose from, side by side: whole models in windows, and cuts in steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.core.plan import Assumptions, Cut, Memory, plan_cut
from swarm.core.planning.token_worth import GAINS, is_measured, worth_of_token
from swarm.core.settings import ModelSettings, RunSettings

WINDOW_STEPS = tuple(sorted(GAINS))
"""Inner steps of the windows that are reckoned: of what was measured."""

Sizes = Callable[[ModelSettings], tuple[Sequence[int], int]]
"""Parameters of each stage, and the hidden size."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to train, and what a fleet would make of it."""

    name: str
    settings: RunSettings
    cut: Cut
    worth: float
    """Of a token, beside one that a machine alone trains on."""
    is_measured: bool
    """Whether members and steps lie between those that the worth was measured with."""
    lines: tuple[str, ...]
    """Of the manifest that choose it: where they differ from the settings asked about."""

    @property
    def useful_tokens_per_s(self) -> float:
        """As many of one machine alone would teach as much."""
        return self.worth * self.cut.tokens_per_s

    @property
    def times_alone(self) -> float:
        return self.worth * self.cut.times_alone


def modes_of(
    settings: RunSettings,
    cuts: Iterable[ModelSettings],
    sizes: Sizes,
    assumptions: Assumptions,
    *,
    num_peers: int,
    memory: Memory,
    can_run: Callable[[RunSettings], bool],
) -> list[Mode]:
    """Each cut in steps, and in windows where a run may have them (`can_run`).

    The batch is the settings' own in all: of a step, or of each member's inner step, as one machine's would be.
    """
    found = []
    for model in (model for model in cuts if model.num_stages <= num_peers):
        num_parameters, hidden_size = sizes(model)
        for candidate in _candidates(replace(settings, model=model)):
            if candidate.has_windows and not can_run(candidate):
                continue
            cut = plan_cut(candidate, num_parameters, hidden_size, assumptions, num_peers=num_peers, memory=memory)
            steps, beside = candidate.averaging.local_steps, cut.beside_rounds
            found.append(
                Mode(
                    name=_name(candidate),
                    settings=candidate,
                    cut=cut,
                    worth=worth_of_token(cut.peers_per_stage, steps, beside=beside),
                    is_measured=is_measured(cut.peers_per_stage, steps, beside=beside),
                    lines=tuple(_lines(settings, candidate)),
                )
            )
    return found


def best_of(modes: Iterable[Mode]) -> Mode | None:
    """The soonest at a loss of those that will do, of equal ones that with the fewest stages; None: none does."""
    return max((mode for mode in modes if not mode.cut.problem), key=_goodness, default=None)


def best_of_each(modes: Sequence[Mode]) -> list[Mode]:
    """Of each name the best, or if none will do the quickest: what a person compares."""
    names = dict.fromkeys(mode.name for mode in modes)
    each = [[mode for mode in modes if mode.name == name] for name in names]
    return [best_of(alike) or max(alike, key=_goodness) for alike in each]


def _goodness(mode: Mode) -> tuple[float, int]:
    return mode.useful_tokens_per_s, -mode.cut.num_stages


def _candidates(settings: RunSettings) -> Iterator[RunSettings]:
    """In steps, and in windows of each length."""
    averaging, codecs = settings.averaging, settings.codecs
    asked = averaging.local_steps
    yield replace(
        settings,
        averaging=replace(averaging, local_steps=1),
        codecs=replace(codecs, averaging="int8") if codecs.averaging == "int2" else codecs,
    )
    plain = replace(codecs, averaging="int2")  # as the worth was measured
    optimizer = replace(settings.optimizer, correction="none", moments="fp32")
    for steps in sorted({*WINDOW_STEPS, *([asked] if asked > 1 else [])}):
        waiting = replace(averaging, local_steps=steps, delay=0)
        for chosen in (waiting, replace(waiting, delay=1)):
            yield replace(settings, averaging=chosen, codecs=plain, optimizer=optimizer)


def _name(settings: RunSettings) -> str:
    what = "windows of local steps" if settings.has_windows else "a round each step"
    if settings.has_windows and settings.averaging.delay:
        what += " beside their rounds"
    return f"{'whole models' if settings.model.num_stages == 1 else 'a pipeline'}, {what}"


def _lines(asked: RunSettings, chosen: RunSettings) -> Iterator[str]:
    """As a manifest has them."""
    if len(asked.model.stage_layers) != chosen.model.num_stages:
        yield f"model.stages = {chosen.model.num_stages}"
    for table in ("averaging", "codecs", "optimizer"):
        before, after = getattr(asked, table), getattr(chosen, table)
        for name in vars(after):
            if getattr(before, name) != getattr(after, name):
                yield f"{table}.{name} = {_toml(getattr(after, name))}"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
