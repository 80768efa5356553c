"""What a run will need: memory, traffic and time a peer of each stage, reckoned before it begins.

Links as full as they were measured to be, no work hidden behind a synchronous round's transfers, and perfect balance:
real runs that lose peers are slower. Bytes and seconds throughout;
bytes are those of messages, and times count what headers add to them. A step is one optimizer step.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.core.audit.recomputed import audits_of_a_part
from swarm.core.cohorts import num_cohorts
from swarm.core.pipeline.compute_mode import ComputeMode, modes
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.settings import BYTES_A_VALUE, KEPT_SNAPSHOTS, RunSettings, TrainingSettings
from swarm.core.transfers import LEAST_LANES, MESSAGE_BYTES, bytes_per_s, join_share, longest_s

PIECE_BYTES = 1 << 20
"""As `swarm.data.pieces` has it."""
SPARE_TOKEN_BYTES = 32 << 20
"""Of tokens that a peer of the first stage holds beside those of its leases."""
FLOAT_BYTES = 4
MONTH_S = 30 * 24 * 3600.0
MAX_JOIN_SHARE = 0.1
"""Of the mean session: a peer that takes longer to join is gone again before it has been of use."""

MOST_JOINS_SHARE = 0.95
"""Of the donors' uplinks: where joins would take up more, each is reckoned to last twenty times as long as alone."""

HEADERS = 1.05
"""Bytes on the line for each byte of a message: IP, TCP, encryption, streams (`benchmarks.homes.links` counts
1.05)."""
LINK_SHARE = 0.87
"""Of a line's rate that a round's transfers keep busy, with answers coming the other way
(`benchmarks.homes.links`)."""
ROUND_TRIPS = 5
"""In a round that no bytes fill: close and commitments, three votes, the outcome and the next step's first report."""

EXACT_NS: Mapping[str, float] = {"fp32": 32.0, "bf16": 32.0, "int8": 32.0, "int4": 32.0, "int2": 32.0, "topk": 42.0}
"""For each value of a step's round, on a core that two peers share: encoding, checking, adding, decoding, and the
optimizer. As `benchmarks.homes.links` counts it for int8, int4 and topk; the others are taken to be as int8."""
PRODUCTS_PER_S = 5e10
"""Of Muon's, on a core: 5.3e10 were counted with 512-bit vectors (`benchmarks.muon`)."""

RESULT_BYTES: Mapping[str, float] = dict(BYTES_A_VALUE.items())
"""Wire bytes of a value in a round's result."""
CONTRIBUTION_BYTES: Mapping[str, float] = {**RESULT_BYTES, "topk": 1 / 8 + BYTES_A_VALUE["int4"] * 3 / 8}
"""Wire bytes of a value in a contribution: topk has a bit for each value and three eighths of them in int4."""
KEPT_FOR_MESSAGES_BYTES = 128 << 20
"""Memory of messages on their way and what they leave for later ones (`swarm.memory.kept_buffers`), at most: what is to
stay of them goes to disk at once."""

LIBRARIES_BYTES = 300 << 20
"""Of a daemon that has loaded all that it computes with on a CPU, before it holds anything: a peer counts its own."""
P2PD_BYTES = 64 << 20
"""Of a p2pd and its guard, beside what each peer that it carries bulk for takes (`benchmarks.owner.carrier`)."""
P2PD_BYTES_A_PEER = 1 << 20
"""Buffers of a connection and of two streams on it, filled."""

ACTIVATION_VALUES: Mapping[str, int] = {"host": 10, "device": 8}
"""Values kept for backward for each hidden value of a token in a layer, of norms, projections and attention. On a
device a norm is one kernel, which keeps less."""
MLP_VALUES = 4
"""Likewise for each value within a gated MLP: gate, its activation, up, and their product. (Korthikanti et al. 2022,
"Reducing activation recomputation", count 17 in all for a plain MLP four times as wide.)"""
LEAST_ACTIVATION_VALUES = 20
"""In all: families whose MLP is narrow have wide heads, or more norms."""

BACKWARD_SHARE = 1.4
"""Memory that a pass takes on a CPU while it lasts, over what it keeps: gradients of activations, and what forward
drops. From 1.1 to 1.4 was measured. A GPU has the memory of what is dropped again at once: there it is a layer's."""

MADE_WHOLE_BYTES = 6
"""For each value of a frozen matrix while it is computed with: in fp32, and what NF4 is looked up by."""

LOSS_CHUNK_TOKENS = 4096
LOSS_CHUNK_LOGITS = 1 << 26
"""The loss is computed on as many tokens at a time as keep within both."""


@dataclass(frozen=True, kw_only=True)
class Turned:
    """What Muon turns of a stage, if it is the run's optimizer."""

    values: int = 0
    products: int = 0
    """Of two integers, in a step."""
    scratch_bytes: int = 0
    """For the largest matrix."""


class StageSize(int):
    """Parameters of a stage that are trained, and the frozen base that they stand on, if there is one."""

    frozen: int
    """Values of the base."""
    frozen_bytes: int
    """As it is kept."""
    largest_frozen: int
    """Values of its largest tensor, which is made whole for a product."""
    turned: "Turned"

    def __new__(
        cls,
        trained: int,
        *,
        frozen: int = 0,
        frozen_bytes: int = 0,
        largest_frozen: int = 0,
        turned: "Turned | None" = None,
    ) -> "StageSize":
        made = super().__new__(cls, trained)
        made.frozen, made.frozen_bytes, made.largest_frozen = frozen, frozen_bytes, largest_frozen
        made.turned = turned or Turned()
        return made

    @classmethod
    def of(cls, num_parameters: int) -> "StageSize":
        """The same; a bare number has no base."""
        return num_parameters if isinstance(num_parameters, StageSize) else cls(num_parameters)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a plan supposes of the peers; all alike."""

    uplink_mbit: float
    downlink_mbit: float
    peers_per_stage: int
    tflops: float
    """10^12 floating point operations a second that a peer really reaches."""
    session_hours: float
    """How long a peer stays, on average."""
    round_trip_ms: float = 40.0
    """From peer to peer and back."""
    exact_ns: float | None = None
    """For each value of a step's round; None: as in `EXACT_NS`."""

    @property
    def up_bytes_per_s(self) -> float:
        """Of messages."""
        return self.uplink_mbit * 1e6 / 8 * LINK_SHARE / HEADERS

    @property
    def down_bytes_per_s(self) -> float:
        """Of messages."""
        return self.downlink_mbit * 1e6 / 8 * LINK_SHARE / HEADERS


SUPPOSED = Assumptions(uplink_mbit=20, downlink_mbit=100, peers_per_stage=4, tflops=1, session_hours=4)
"""Of a fleet of which nothing else is known."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One peer of a stage. Bytes are for one step."""

    stage: int
    num_layers: int
    num_parameters: int
    memory_bytes: Mapping[str, int]
    """Items of `stage_memory_bytes`, of a peer that computes a microbatch at once."""
    least_memory_bytes: Mapping[str, int]
    """Of one that computes it sample by sample, forward twice."""
    gpu_memory_bytes: Mapping[str, int]
    """Of one that computes it at once on a GPU."""
    round_up_bytes: float
    round_down_bytes: float
    uneven_bytes: float
    """That the member of a round that reduces most moves beyond these, each way."""
    audit_up_bytes: float
    """To those who recompute reduced parts."""
    activation_up_bytes: float
    activation_down_bytes: float
    compute_s: float
    exact_s: float
    """Encoding, averaging and the optimizer's step."""
    uplink_s: float
    """How long the uplink is busy in a step."""
    work_s: float
    """Compute or activation traffic of a step, whichever takes longer."""
    fill_s: float
    """How long the other stages wait for a first microbatch to pass here, there and back."""
    round_s: float
    """From the close of a step to the version it makes."""
    longest_round_s: float
    """How long peers wait at most for the bytes of a round."""
    join_bytes: float
    join_s: float
    """With what steps leave of the donors' uplinks, shared with all who join meanwhile; until it is a member."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a machine's memory and, if it has one, its GPU's."""

    host_bytes: int
    device_bytes: int = 0

    @property
    def has_gpu(self) -> bool:
        return self.device_bytes > 0

    def fits(self, there: "Memory") -> bool:
        """Whether it is to be had where so much is there."""
        return self.host_bytes <= there.host_bytes and self.device_bytes <= there.device_bytes

    def __str__(self) -> str:
        beside = f", {self.device_bytes / 1e9:.1f} of a GPU" if self.has_gpu else ""
        return f"{self.host_bytes / 1e9:.1f} GB{beside}"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A number of stages for a fleet, and what comes of it."""

    num_stages: int
    peers_per_stage: int
    """The fleet's peers, spread evenly; what is left over stands by."""
    tokens_per_s: float
    times_alone: float
    """The same over that of one machine alone."""
    beside_rounds: float
    """As `Plan` has it."""
    needs: Memory
    """That the stage that needs most asks of a peer."""
    join_s: float
    month_bytes: float
    """Up and down together, of a peer of the busiest stage that runs all day."""
    problem: str = ""
    """Why it will not do; empty if it will."""
    lacks: str = ""
    """In a word."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    stages: tuple[StagePlan, ...]
    step_s: float
    beside_rounds: float
    """Of a step's work, the share that is done while the round of the one before goes on."""
    tokens_per_s: float
    month_bytes: tuple[float, ...]
    """Up and down together, of a peer of each stage that runs all day."""
    run_s: float
    """The whole run."""
    run_bytes: tuple[float, ...]
    """Up and down together, of a peer of each stage that joins once and stays for the whole run."""
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]
    """Why the run should not be started like this; empty if it may."""


def held_token_bytes(settings: RunSettings) -> int:
    """On the disk of a peer of the first stage, at most: leases for two steps and a chunk, those that it may have to
    show, and what is spare."""
    data, order = settings.data, DataOrder.of_run(settings)
    steps = 2 + (settings.audits.retained_versions + 2 if settings.replays else 0)
    chunks = 2 + -(-steps * settings.microbatches_per_step // order.microbatches_per_chunk)
    # A slice lies in whole pieces, and in one more where it does not begin with one.
    of_slice = (order.slice_tokens * data.token_bytes // PIECE_BYTES + 2) * PIECE_BYTES
    whole = (data.num_train_tokens + data.num_held_out_tokens) * data.token_bytes
    return min(whole, chunks * order.slices_per_chunk * of_slice + SPARE_TOKEN_BYTES)


TOKENS = "the run's tokens"
ONCE_A_MACHINE = frozenset({TOKENS, "frozen base", "libraries"})
"""Items of the host and its disk that all peers of a daemon at one stage have together."""


def stage_memory_bytes(
    settings: RunSettings,
    num_parameters: int,
    hidden_size: int,
    device: str,
    *,
    stage: int | None = None,
    mode: ComputeMode | None = None,
) -> dict[str, int]:
    """Bytes a peer of the stage needs, by item; names begin with `host.`, `device.` or `disk.`.

    On the CPU everything is the host's. About 20 bytes of host memory a parameter, 14 with moments in int8, 8 more with
    a delay, and what does not grow with the stage. Of the host's memory it is what the system cannot take: files that
    are mapped are the disk's. Without `stage`, an upper bound for any stage of that many parameters; without `mode`, of
    a peer that computes as the run has it. See `total_bytes`.
    """
    mode = mode or ComputeMode.of_run(settings)
    on_device = "host" if device == "cpu" else "device"
    moments = round(moment_bytes(settings, num_parameters))
    versions = 3 if settings.optimizer.correction == "extrapolate" else 2
    weights = FLOAT_BYTES * num_parameters
    rounded = settings.model.compute_dtype == "bf16"
    codec = settings.codecs.averaging
    kept = settings.audits.retained_versions + 1
    is_last = stage == settings.model.num_stages - 1
    # A step's own contribution, and what the others sent to this peer to reduce.
    inputs = 2 * CONTRIBUTION_BYTES[codec] * settings.round_values * num_parameters
    outputs = RESULT_BYTES[codec] * settings.round_values * num_parameters
    messages = min(round(inputs + outputs), _message_bytes(settings, num_parameters))
    # On the host the sum of the step whose round goes on lies where the version is to be that the round makes.
    is_ahead = settings.averaging.delay > 0
    num_sums = 1 + (is_ahead and not (settings.has_windows and on_device == "device")) - (on_device == "host")
    whole_gradient = weights // 2 if rounded and on_device == "device" else weights
    items = {
        "host.libraries": LIBRARIES_BYTES,
        "host.p2pd": p2pd_bytes(settings.limits.max_peers_per_stage),
        f"host.weights, {versions} versions": versions * weights,
        "host.moments": moments,
        f"{on_device}.gradient sums": num_sums * weights,
        f"{on_device}.gradient of a microbatch": whole_gradient,  # before any of it is added to a sum
        f"{on_device}.activations in flight": _activation_bytes(settings, hidden_size, stage, mode, on_device),
        f"{on_device}.gradients of activations": round(
            _computed_activation_bytes(settings, hidden_size, stage, mode, on_device)
            * (BACKWARD_SHARE if on_device == "host" else 1 / _num_layers(settings, stage))
        ),
        "host.messages": messages,
        f"disk.{KEPT_SNAPSHOTS} snapshots": KEPT_SNAPSHOTS * (weights + moments),
        "disk.results for late peers": round(settings.retained_results * outputs),
        # And what audits have of two contributions: as it came, and as it came out here.
        "disk.encoded parts of the last steps": round((kept + settings.replays) * inputs + outputs),
    }
    if on_device == "host" and not is_ahead and not settings.replays:
        # Nothing is computed beside a round: its messages have the memory of a microbatch's gradient.
        items["host.messages"] = max(0, messages - whole_gradient)
    # Twice the weights, and moments; a step's mean has the memory of the version that the round is to make.
    window = 2 * weights + round(settings.inner.moment_bytes * num_parameters) if settings.has_windows else 0
    steps_there = on_device == "device" and mode.steps_there
    if window and steps_there:
        items["device.window"] = window
    if window:
        items["host.window"] = window - (weights if steps_there and not is_ahead else 0)
    if window and is_ahead:
        items["host.where a window begins beside a round"] = weights
    if settings.optimizer.name == "muon":
        items["host.largest matrix being turned"] = _turned(settings, num_parameters).scratch_bytes
    if settings.replays:
        ways = settings.codecs.activations, settings.codecs.activation_gradients
        width = hidden_size // settings.model.subspace
        token_bytes = sum(2 * activation_bytes_per_token(way, width) for way in ways) + targets_bytes_per_token(
            settings
        )
        exhibits = settings.microbatches_of_one * settings.microbatch_tokens * token_bytes
        items["disk.exhibits kept for audits"] = round((kept + 1) * exhibits)  # and those of what this peer audits
        items["disk.weights kept for audits"] = (kept + 1) * weights  # with the version before the oldest step's
        items[f"{on_device}.sums of a replay"] = weights
        # A claim, its replay and second moments, all of them decoded: after the replay, of whose sums and microbatch's
        # gradient they have the memory.
        if window and steps_there:
            items["device.window of a replay"] = window
        if window:
            items["host.window of a replay"] = window + (0 if steps_there else weights)
        else:
            items["host.contribution beside its replay"] = (1 if on_device == "host" else 3) * weights
        items[f"{on_device}.activations of a replay"] = _computed_activation_bytes(
            settings, hidden_size, stage, mode, on_device
        )
    if settings.leaves_residual:
        items["host.residual"] = weights
    base = StageSize.of(num_parameters)
    if base.frozen:
        # It is mapped, but read for every microbatch: without memory for it a peer waits for its disk.
        items["disk.frozen base"] = items[f"{on_device}.frozen base"] = base.frozen_bytes
        items[f"{on_device}.largest matrix of the base made whole"] = MADE_WHOLE_BYTES * base.largest_frozen
    if on_device == "device" and settings.replays:
        items["device.weights of a replay"] = 2 * (weights // 2 if rounded else weights)
    elif rounded and settings.replays:  # in fp32 they are those that are mapped
        items["host.weights of a replay"] = (1 + is_ahead) * weights // 2
    if rounded:  # but for embeddings and norms, which stay in fp32: here as if there were none but the first
        num_rounded = versions + bool(window and is_ahead)  # and where a window is that follows none of them yet
        items[f"{on_device}.weights in bf16, {num_rounded} versions"] = num_rounded * weights // 2
    if on_device == "device" and (not rounded or stage in (None, 0)):
        embedding = FLOAT_BYTES * _model_vocabulary(settings) * hidden_size
        items[f"device.weights, {versions} versions"] = versions * (min(weights, embedding) if rounded else weights)
    if stage is None or is_last:
        vocabulary = max(settings.data.vocab_size, _model_vocabulary(settings))
        tokens = min(settings.microbatch_tokens, LOSS_CHUNK_TOKENS, LOSS_CHUNK_LOGITS // vocabulary + 1)
        items[f"{on_device}.logits and their gradient"] = 2 * FLOAT_BYTES * tokens * vocabulary
    return items


def p2pd_bytes(num_peers: int) -> int:
    """Of a p2pd and its guard that carry bulk for so many peers."""
    return P2PD_BYTES + P2PD_BYTES_A_PEER * num_peers


def memory_of(
    settings: RunSettings, num_parameters: Sequence[int], hidden_size: int, device: str, mode: ComputeMode
) -> Memory:
    """What the stage that needs most of either asks of a peer that computes like this."""
    stages = [
        stage_memory_bytes(settings, number, hidden_size, device, stage=stage, mode=mode)
        for stage, number in enumerate(num_parameters)
    ]
    return Memory(max(total_bytes(one, "host") for one in stages), max(total_bytes(one, "device") for one in stages))


def total_bytes(items: Mapping[str, int], place: str, num_peers: int = 1) -> int:
    """Sum of the items on the "host", "device" or "disk", of so many peers of a daemon at that stage."""
    there = {name.removeprefix(f"{place}."): size for name, size in items.items() if name.startswith(f"{place}.")}
    return sum(size if name in ONCE_A_MACHINE else num_peers * size for name, size in there.items())


def activation_bytes_per_token(codec: str, hidden_size: int) -> float:
    """Wire bytes of one token of so many values between two stages.

    int8 and int4 (int4h) have scales for each 64 or 32 values and keep the largest values aside.
    """
    aside = 4 * min(hidden_size, 4 + hidden_size // 256)
    if codec == "int8":
        return hidden_size + 2 * -(-hidden_size // 64) + aside
    if codec in ("int4", "int4h"):
        return -(-hidden_size // 2) + 2 * -(-hidden_size // 32) + aside
    return hidden_size * {"fp32": 4.0, "bf16": 2.0}[codec]


def targets_bytes_per_token(settings: RunSettings) -> int:
    """Of what goes with an activation: a target, and where it means nothing without them the token itself."""
    return FLOAT_BYTES * (2 if settings.model.sends_ids else 1)


def hop_bytes_per_token(settings: RunSettings, hidden_size: int) -> tuple[float, float]:
    """What a token takes between two stages, there with what goes with it, and back."""
    codecs, width = settings.codecs, hidden_size // settings.model.subspace
    there = activation_bytes_per_token(codecs.activations, width) + targets_bytes_per_token(settings)
    return there, activation_bytes_per_token(codecs.activation_gradients, width)


def round_bytes(codec: str, num_values: int, num_members: float) -> float:
    """Bytes one member of a round uploads, and as many it downloads; `num_members` may be a mean.

    Contributions to the others' parts, and the results of its own parts to the others: each (R - 1) / R of a vector.
    """
    vector_bytes = (CONTRIBUTION_BYTES[codec] + RESULT_BYTES[codec]) * num_values
    return (num_members - 1) / num_members * vector_bytes


def slowest_round_bytes(settings: RunSettings, num_parameters: int, num_members: int) -> float:
    """As `round_bytes`, of the member of a cohort that reduces most: few parts cannot be dealt out evenly."""
    num_values, part_values = settings.round_values * num_parameters, settings.part_values(num_parameters)
    cohort = num_members / num_cohorts(num_members)
    share = min(1.0, math.ceil(math.ceil(num_values / part_values) / cohort) * part_values / num_values)
    codec = settings.codecs.averaging
    sent = (1 - share) * CONTRIBUTION_BYTES[codec] + share * (cohort - 1) * RESULT_BYTES[codec]
    return max(sent * num_values, round_bytes(codec, num_values, num_members))


def audit_bytes_of(settings: RunSettings, num_parameters: int, num_members: int) -> float:
    """That one member of a stage sends in a step to those who recompute reduced parts: its own part of each."""
    num_values = round(settings.round_values * num_parameters)
    audits = audits_of_a_part(settings.audits.reducer_share, -(-num_values // settings.part_values(num_values)))
    others = num_members - 1
    return min(others, audits) * others / num_members * CONTRIBUTION_BYTES[settings.codecs.averaging] * num_values


def state_bytes(settings: TrainingSettings, num_parameters: int) -> float:
    """Of a stage's state, as a joiner downloads it."""
    return num_parameters * FLOAT_BYTES + moment_bytes(settings, num_parameters)


def moment_bytes(settings: TrainingSettings, num_parameters: int) -> float:
    """Of the moments in a stage's state; of a bare number of parameters Muon is taken to turn none."""
    turned = _turned(settings, num_parameters)
    return num_parameters * settings.state_moment_bytes - FLOAT_BYTES * turned.values


def _turned(settings: TrainingSettings, num_parameters: int) -> Turned:
    return StageSize.of(num_parameters).turned if settings.optimizer.name == "muon" else Turned()


def result_bytes(settings: TrainingSettings, num_parameters: int) -> float:
    """Of a stage's result, as one that is behind fetches it."""
    return num_parameters * settings.round_values * RESULT_BYTES[settings.codecs.averaging]


def exact_round_s(settings: TrainingSettings, num_parameters: int, ns: float | None = None) -> float:
    """Seconds of encoding, averaging and the optimizer in a round, at so many nanoseconds a value."""
    each_ns = EXACT_NS[settings.codecs.averaging] if ns is None else ns
    products = _turned(settings, num_parameters).products
    return settings.round_values * num_parameters * each_ns * 1e-9 + products / PRODUCTS_PER_S


def longest_round_s(settings: RunSettings, num_parameters: int, num_members: int) -> float:
    """Seconds after which the bytes of a round of a stage are not waited for however they come."""
    num_bytes = round_bytes(settings.codecs.averaging, settings.round_values * num_parameters, num_members)
    return longest_s(num_bytes, bytes_per_s(settings.deadlines.least_mbit), floor_s=0.0)


def plan_run(settings: RunSettings, num_parameters: Sequence[int], hidden_size: int, assumptions: Assumptions) -> Plan:
    """The arithmetic of a run whose stages have that many parameters each."""

    def planned(stage: int, links: Assumptions) -> StagePlan:
        return _plan_stage(settings, stage, num_parameters[stage], hidden_size, links)

    def beside_s(parts: tuple[StagePlan, ...], links: Assumptions) -> list[float]:
        slowed = [planned(part.stage, beside_a_joiner(links)) for part in parts]
        return steps_beside_s(settings, parts, slowed, links)

    stages = tuple(planned(stage, assumptions) for stage in range(settings.model.num_stages))
    undisturbed_s = step_seconds(settings, stages, assumptions)
    # Who joins is one of the peers of its stage: the others are there.
    there = replace(assumptions, peers_per_stage=max(1, assumptions.peers_per_stage - 1))
    before = tuple(planned(stage, there) for stage in range(settings.model.num_stages))
    slowest_s = max(beside_s(before, there))
    joins_s = [_join_s(settings, part, slowest_s, there) for part in before]
    stages = tuple(replace(part, join_s=join_s) for part, join_s in zip(stages, joins_s, strict=True))
    # As many come as leave.
    joining = [min(1.0, assumptions.peers_per_stage * s / (assumptions.session_hours * 3600)) for s in joins_s]
    step_s = with_joins_s(undisturbed_s, zip(joining, beside_s(stages, assumptions), strict=True))
    run_s = step_s * settings.optimizer.total_steps
    month = tuple(
        (part.round_up_bytes + part.round_down_bytes + part.activation_up_bytes + part.activation_down_bytes)
        * (HEADERS * MONTH_S / step_s)
        for part in stages
    )
    return Plan(
        stages=stages,
        step_s=step_s,
        beside_rounds=min(1.0, max(part.round_s for part in stages) / step_s) if settings.averaging.delay else 0.0,
        tokens_per_s=settings.step_tokens(assumptions.peers_per_stage) / step_s,
        month_bytes=month,
        run_s=run_s,
        run_bytes=tuple(size * run_s / MONTH_S + part.join_bytes for size, part in zip(month, stages, strict=True)),
        warnings=(*_slow_rounds(settings, stages), *_slow_lines(settings, assumptions)),
        refusals=(
            *_slow_joins(stages, assumptions),
            *_endless_rounds(settings, stages, assumptions),
            *_lost_joins(settings, before, joins_s, slowest_s, there),
        ),
    )


def tokens_per_s_alone(
    settings: RunSettings, num_parameters: Sequence[int], hidden_size: int, assumptions: Assumptions
) -> float:
    """Of one machine that holds the whole model and does nothing but compute."""
    flops = sum(flops_a_token(settings, stage, number, hidden_size) for stage, number in enumerate(num_parameters))
    return assumptions.tflops * 1e12 / flops


def plan_cut(
    settings: RunSettings,
    num_parameters: Sequence[int],
    hidden_size: int,
    assumptions: Assumptions,
    *,
    num_peers: int,
    memory: Memory,
) -> Cut:
    """The run with `settings.model` as it is cut, on so many peers, no fewer than stages, with so much memory each.

    As peers do, those that cannot compute a microbatch at once compute it sample by sample, forward twice.
    """
    num_stages = settings.model.num_stages
    assumptions = replace(assumptions, peers_per_stage=num_peers // num_stages)
    for mode in (ComputeMode.of_run(settings), [*modes(settings)][-1]):
        needs = memory_of(settings, num_parameters, hidden_size, "cuda" if memory.has_gpu else "cpu", mode)
        if needs.fits(memory):
            break
    plan = plan_run(
        replace(settings, model=replace(settings.model, recompute=mode.recompute)),
        num_parameters,
        hidden_size,
        assumptions,
    )
    problem, lacks = "", ""
    if not needs.fits(memory):
        problem, lacks = f"needs {needs}, peers have {memory}", "memory"
    elif plan.refusals:
        problem, lacks = plan.refusals[0].partition(": ")[2].partition(";")[0], "time"
    return Cut(
        num_stages=num_stages,
        peers_per_stage=assumptions.peers_per_stage,
        tokens_per_s=plan.tokens_per_s,
        times_alone=plan.tokens_per_s / tokens_per_s_alone(settings, num_parameters, hidden_size, assumptions),
        beside_rounds=plan.beside_rounds,
        needs=needs,
        join_s=max(part.join_s for part in plan.stages),
        month_bytes=max(plan.month_bytes),
        problem=problem,
        lacks=lacks,
    )


def _plan_stage(
    settings: RunSettings, stage: int, num_parameters: int, hidden_size: int, assumptions: Assumptions
) -> StagePlan:
    start, stop = settings.model.stage_layers[stage]
    members = assumptions.peers_per_stage
    tokens = settings.step_tokens(members) / members
    forward, backward = (tokens * size for size in hop_bytes_per_token(settings, hidden_size))
    is_first, is_last = stage == 0, stage == settings.model.num_stages - 1
    activation_up = (0 if is_last else forward) + (0 if is_first else backward)
    activation_down = (0 if is_first else forward) + (0 if is_last else backward)
    round_each_way = round_bytes(settings.codecs.averaging, settings.round_values * num_parameters, members)
    uneven_bytes = slowest_round_bytes(settings, num_parameters, members) - round_each_way

    compute_s = flops_a_token(settings, stage, num_parameters, hidden_size) * tokens / (assumptions.tflops * 1e12)
    activation_s = max(
        activation_up / assumptions.up_bytes_per_s,
        activation_down / assumptions.down_bytes_per_s,
    )
    # A snapshot, and on average the results since: as many as there are steps between two, or fewer, or none.
    num_results = (settings.checkpoint.snapshot_every - 1) / 2
    join_bytes = state_bytes(settings, num_parameters) + num_results * result_bytes(settings, num_parameters)
    join_bytes += StageSize.of(num_parameters).frozen_bytes
    round_trip_s = assumptions.round_trip_ms / 1000
    round_trips_s = ROUND_TRIPS * round_trip_s if members > 1 else 0.0
    exact_s = exact_round_s(settings, num_parameters, assumptions.exact_ns)
    work_s = max(compute_s, activation_s)
    audit_bytes = audit_bytes_of(settings, num_parameters, members)
    # It is sent while the line has nothing else to do, and then beside a round.
    beside_s = max(0.0, audit_bytes / assumptions.up_bytes_per_s - (work_s - activation_s))
    each_s = work_s / max(1.0, tokens / settings.microbatch_tokens)
    *_, least = modes(settings)
    memory, least_memory, gpu_memory = (
        stage_memory_bytes(settings, num_parameters, hidden_size, device, stage=stage, mode=mode)
        for device, mode in (("cpu", None), ("cpu", least), ("cuda", None))
    )
    return StagePlan(
        stage=stage,
        num_layers=stop - start,
        num_parameters=num_parameters,
        memory_bytes=memory,
        least_memory_bytes=least_memory,
        gpu_memory_bytes=gpu_memory,
        round_up_bytes=round_each_way,
        round_down_bytes=round_each_way,
        uneven_bytes=uneven_bytes,
        audit_up_bytes=audit_bytes,
        activation_up_bytes=activation_up,
        activation_down_bytes=activation_down,
        compute_s=compute_s,
        exact_s=exact_s,
        uplink_s=(round_each_way + activation_up + audit_bytes) / assumptions.up_bytes_per_s,
        work_s=work_s,
        fill_s=each_s + round_trip_s,
        round_s=(round_each_way + uneven_bytes) / min(assumptions.up_bytes_per_s, assumptions.down_bytes_per_s)
        + beside_s
        + round_trips_s
        + exact_s,
        longest_round_s=longest_round_s(settings, num_parameters, members),
        join_bytes=join_bytes,
        join_s=math.inf,  # until it is known how busy a step keeps the donors
    )


def beside_a_joiner(assumptions: Assumptions) -> Assumptions:
    """What a stage's peers have while somebody takes its state: of their uplinks, what that one leaves them, all of it,
    for what rounds leave idle that one fills. A stage's only peer shares its line with one, too."""
    left = min(1.0, (1 - join_share(assumptions.peers_per_stage)) / LINK_SHARE)
    return replace(assumptions, uplink_mbit=assumptions.uplink_mbit * left)


def steps_beside_s(
    settings: RunSettings, stages: Sequence[StagePlan], slowed: Sequence[StagePlan], assumptions: Assumptions
) -> list[float]:
    """By the stage whose state somebody takes, a step: with that one as it is `slowed`."""
    each = ([*stages[:at], slow, *stages[at + 1 :]] for at, slow in enumerate(slowed))
    return [step_seconds(settings, parts, assumptions) for parts in each]


def with_joins_s(undisturbed_s: float, joins: Iterable[tuple[float, float]]) -> float:
    """A step on average. `joins`: of each stage, the share of the time in which somebody takes its state, and how long
    a step then lasts; the slowest stage decides."""
    nobody_joins, mean_s = 1.0, 0.0
    for share, beside_s in sorted(joins, key=lambda one: -one[1]):
        mean_s += nobody_joins * share * beside_s
        nobody_joins *= 1 - share
    return mean_s + nobody_joins * undisturbed_s


def _joiner_per_s(settings: RunSettings, part: StagePlan, step_s: float, assumptions: Assumptions) -> float:
    """Bytes a second that who joins these peers of the stage is sent. As many come as leave, and share what the step
    leaves of the donors' uplinks: with u of that taken up by joins, one takes 1 / (1 - u) times as long as alone (a
    queue whose customers are all served at once)."""
    members = assumptions.peers_per_stage
    free = max(join_share(members), 1 - LINK_SHARE * part.uplink_s / step_s)
    donors_per_s = members * assumptions.up_bytes_per_s / LINK_SHARE * free
    leavers_per_s = (members + 1) / (assumptions.session_hours * 3600)
    taken = leavers_per_s * state_bytes(settings, part.num_parameters) / donors_per_s
    return min(assumptions.down_bytes_per_s, donors_per_s * max(1 - MOST_JOINS_SHARE, 1 - taken))


def _join_s(settings: RunSettings, part: StagePlan, step_s: float, assumptions: Assumptions) -> float:
    """A snapshot, the results since and those that are made until it has them all. Then it asks, or when it lacks one,
    where it has that and the next in no more than a step: half of one is then left on average, and the next one is
    waited for if a round is closing, which names nobody more: so a round's time, as often as there is one. Of T seconds
    a share result_s / step_s goes to the results made in them: T = join_bytes / per_s / (1 - result_s / step_s)."""
    per_s = _joiner_per_s(settings, part, step_s, assumptions)
    result_s = result_bytes(settings, part.num_parameters) / per_s
    early_s = result_s if 2 * result_s <= step_s else 0.0
    waits_s = max(0.0, step_s / 2 + min(step_s, part.round_s) - early_s)
    return part.join_bytes / per_s / max(1 - MOST_JOINS_SHARE, 1 - result_s / step_s) + waits_s


def step_seconds(settings: RunSettings, stages: Sequence[StagePlan], assumptions: Assumptions) -> float:
    """Synchronous rounds follow the work, which begins with an empty pipeline: (m + s - 1) / m times the work of m
    microbatches in s equal stages. With delay = 1 they share links and cores with it."""
    if settings.averaging.delay == 0:
        slowest = max(stages, key=lambda part: part.work_s)
        fill_s = sum(part.fill_s for part in stages if part is not slowest)
        return slowest.work_s + fill_s + max(part.round_s for part in stages)
    return max(
        max(
            part.work_s + part.exact_s,
            part.round_s,
            part.uplink_s + part.uneven_bytes / assumptions.up_bytes_per_s,
            (part.round_down_bytes + part.uneven_bytes + part.activation_down_bytes) / assumptions.down_bytes_per_s,
        )
        for part in stages
    )


def _slow_rounds(settings: RunSettings, stages: Sequence[StagePlan]) -> list[str]:
    name, number = "batch.target_tokens", settings.batch.target_tokens
    if settings.has_windows:
        name, number = "averaging.local_steps", settings.averaging.local_steps
    return [
        f"stage {part.stage}: a round takes {part.round_s:.2g} s, longer than the {part.work_s:.2g} s of work in a "
        f"step; raise {name} = {number} to {math.ceil(number * part.round_s / part.work_s)}, or ask for faster links"
        for part in stages
        if part.round_s > part.work_s
    ]


def _longest_join_s(assumptions: Assumptions) -> float:
    return MAX_JOIN_SHARE * assumptions.session_hours * 3600


def _slow_joins(stages: Sequence[StagePlan], assumptions: Assumptions) -> list[str]:
    most_s = _longest_join_s(assumptions)
    return [
        f"stage {part.stage}: joining moves {part.join_bytes / 1e9:.1f} GB in {part.join_s / 60:.0f} minutes, more "
        f"than a tenth of the {assumptions.session_hours:g} h a peer stays ({most_s / 60:.0f} minutes); "
        "raise model.stages, or ask for faster links"
        for part in stages
        if part.join_s > most_s
    ]


def _slow_lines(settings: RunSettings, assumptions: Assumptions) -> list[str]:
    least, slower = settings.deadlines.least_mbit, min(assumptions.uplink_mbit, assumptions.downlink_mbit)
    if slower >= least:
        return []
    return [
        f"lines of {slower:g} Mbit/s are slower than deadlines.least_mbit = {least:g}: a peer that shares such a line "
        "with anything else may be left out of rounds; lower it"
    ]


def _endless_rounds(settings: RunSettings, stages: Sequence[StagePlan], assumptions: Assumptions) -> list[str]:
    """Of which peers would give up the bytes while they still come."""
    slower = min(assumptions.up_bytes_per_s, assumptions.down_bytes_per_s)
    return [
        f"stage {part.stage}: the bytes of a round take {part.round_up_bytes / slower:.0f} s, and are waited for "
        f"{part.longest_round_s:.0f} s; lower deadlines.least_mbit = {settings.deadlines.least_mbit:g}"
        for part in stages
        if part.round_up_bytes / slower > part.longest_round_s
    ]


def _lost_joins(
    settings: RunSettings,
    stages: Sequence[StagePlan],
    joins_s: Sequence[float],
    step_s: float,
    assumptions: Assumptions,
) -> list[str]:
    """A joiner must find the results since its snapshot."""
    kept, found = settings.retained_results, []
    for part, join_s in zip(stages, joins_s, strict=True):
        if join_s > _longest_join_s(assumptions):
            continue  # said already
        per_s = _joiner_per_s(settings, part, step_s, assumptions)
        state_s = state_bytes(settings, part.num_parameters) / per_s
        if settings.checkpoint.snapshot_every + state_s / step_s > kept:
            found.append(
                f"stage {part.stage}: while one takes the state, in {state_s:.0f} s, the stage makes "
                f"{state_s / step_s:.0f} versions, and keeps the results of {kept}; raise checkpoint.snapshot_every"
            )
    return found


def flops_a_token(settings: RunSettings, stage: int, num_parameters: int, hidden_size: int) -> float:
    """Operations a token costs: 2 a weight forward, 4 backward, 2 where it is frozen, and causal attention over the
    sequence."""
    start, stop = settings.model.stage_layers[stage]
    embedding = settings.data.vocab_size * hidden_size if stage == 0 else 0  # a look-up costs none
    frozen = StageSize.of(num_parameters).frozen
    weights = max(0, num_parameters + frozen - embedding)
    passes = 8 if settings.model.recompute else 6
    return -2 * max(0, frozen - embedding) + passes * (
        weights + settings.data.sequence_length * hidden_size * (stop - start)
    )


def _computed_activation_bytes(
    settings: RunSettings, hidden_size: int, stage: int | None, mode: ComputeMode, on_device: str
) -> int:
    """Of the samples that are computed at once."""
    value_bytes = FLOAT_BYTES if settings.model.compute_dtype == "fp32" else 2
    tokens = mode.samples_at_once * settings.data.sequence_length
    values = ACTIVATION_VALUES[on_device] * hidden_size + MLP_VALUES * _mlp_size(settings, hidden_size)
    return tokens * max(LEAST_ACTIVATION_VALUES * hidden_size, values) * _num_layers(settings, stage) * value_bytes


def _num_layers(settings: RunSettings, stage: int | None) -> int:
    """None: of the stage that has most."""
    layers = [stop - start for start, stop in settings.model.stage_layers]
    return max(layers) if stage is None else layers[stage]


def _model_vocabulary(settings: RunSettings) -> int:
    """Rows of the model's head, which may be more than the tokenizer has ids."""
    return int(json.loads(settings.model.config_json).get("vocab_size", 0))


def _mlp_size(settings: RunSettings, hidden_size: int) -> int:
    """Values within the MLP of a layer, of all the experts that a token has."""
    config = json.loads(settings.model.config_json)
    names = ("moe_intermediate_size", "intermediate_size", "n_inner")
    width = next((config[name] for name in names if config.get(name)), 4 * hidden_size)  # as GPT-2 has it
    return int(width) * int(config.get("num_experts_per_tok") or 1)


def _activation_bytes(
    settings: RunSettings, hidden_size: int, stage: int | None, mode: ComputeMode, on_device: str
) -> int:
    computed = _computed_activation_bytes(settings, hidden_size, stage, mode, on_device)
    inputs = settings.microbatch_tokens * hidden_size * FLOAT_BYTES
    # What a peer has begun waits for the later stages; where there are none, it is done at once.
    in_flight = settings.limits.max_in_flight if settings.model.num_stages > 1 else 1
    has_later = stage is None or stage < settings.model.num_stages - 1
    # With recompute, and at the last stage, only inputs wait, and what is computed is there once.
    return in_flight * (inputs + computed) if has_later and not mode.recompute else in_flight * inputs + computed


def _message_bytes(settings: RunSettings, num_parameters: int) -> int:
    """Bodies that are received or worked on at a time, at most: what is whole goes to disk.

    From each other member as much as a fast line has under way; a part of this peer's own, as floats and encoded; and
    under a rule that looks at each contribution by itself, all of them to one part, as floats.
    """
    members = settings.limits.max_peers_per_stage
    under_way = (members - 1) * LEAST_LANES * MESSAGE_BYTES
    rows = 1 if settings.averaging.rule == "mean" else members
    part = FLOAT_BYTES * settings.part_values(num_parameters)
    return min(KEPT_FOR_MESSAGES_BYTES, under_way + (rows + 2) * part)
