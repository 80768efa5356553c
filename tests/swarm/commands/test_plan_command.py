"""The arithmetic of a run, against the numbers of the design and the codecs' own sizes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from swarm.averaging.activations import activation_codec
from swarm.averaging.codecs import result_codec, vector_codec
from swarm.commands.plan import command
from swarm.core.pipeline.compute_mode import modes
from swarm.core.plan import (
    CONTRIBUTION_BYTES,
    EXACT_NS,
    HEADERS,
    KEPT_FOR_MESSAGES_BYTES,
    LINK_SHARE,
    P2PD_BYTES_A_PEER,
    RESULT_BYTES,
    ROUND_TRIPS,
    Assumptions,
    Cut,
    Memory,
    activation_bytes_per_token,
    plan_cut,
    plan_run,
    round_bytes,
    slowest_round_bytes,
    stage_memory_bytes,
    tokens_per_s_alone,
    total_bytes,
)
from swarm.core.planning.verdict import Verdict, verdict_on
from swarm.core.settings import PART_VALUES, ActivationCodecName, AveragingCodecName, RunSettings
from swarm.core.transfers import LEAST_LANES, MESSAGE_BYTES, join_share
from swarm.manifest.file import assumed_data, freeze, parse_manifest
from swarm.manifest.model import hidden_size, stage_num_parameters
from swarm.model.families import canonical_config_json
from swarm.model.initial import initial_weights
from swarm.model.stage import StageModel

LLAMA_1B = (
    '{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,'
    '"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}'
)
LINKS = Assumptions(uplink_mbit=20, downlink_mbit=100, peers_per_stage=8, tflops=1, session_hours=4)
LASTING = replace(LINKS, session_hours=1e9)
"""Nobody leaves or joins."""
EVEN = 8 * PART_VALUES
"""Values of which every peer reduces a part."""


def _settings(text: str = "") -> RunSettings:
    manifest = parse_manifest(text, Path("run.toml"))
    return freeze(manifest, assumed_data(manifest), ())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "int2", "topk"])
def test_bytes_of_rounds_are_those_of_the_codecs(codec: AveragingCodecName) -> None:
    values = 1 << 18
    assert CONTRIBUTION_BYTES[codec] * values == vector_codec(codec).encoded_bytes(values)
    assert RESULT_BYTES[codec] * values == result_codec(codec).encoded_bytes(values)


def test_low_bit_codecs_need_less_of_the_uplink_and_a_residual() -> None:
    plain = _settings()
    for codec, bound in (("int4", 0.53), ("topk", 0.43)):
        settings = _settings(f"[codecs]\naveraging = '{codec}'")
        assert round_bytes(codec, 10**6, 8) < bound * round_bytes("int8", 10**6, 8)
        assert "host.residual" in stage_memory_bytes(settings, 1000, 128, "cpu")
    assert "host.residual" not in stage_memory_bytes(plain, 1000, 128, "cpu")


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "int4h"])
def test_bytes_of_activations_are_those_of_the_codecs(codec: ActivationCodecName) -> None:
    for width in (64, 99, 100, 1024, 4096):
        assert activation_bytes_per_token(codec, width) * 6 == activation_codec(codec).encoded_bytes((2, 3, width))


def test_a_subspace_takes_of_a_line_what_its_values_and_ids_do() -> None:
    links = replace(LINKS, uplink_mbit=1.0)
    wide, narrow = (plan_run(_settings(f"[model]\nsubspace = {k}"), [10**6] * 2, 128, links) for k in (1, 8))
    tokens = _settings().step_tokens(LINKS.peers_per_stage) / LINKS.peers_per_stage
    for made, there, back in ((wide, 128, 4), (narrow, 16, 8)):
        first, last = made.stages
        assert first.activation_up_bytes == pytest.approx(tokens * (activation_bytes_per_token("int8", there) + back))
        assert last.activation_up_bytes == pytest.approx(tokens * activation_bytes_per_token("int8", there))
    assert narrow.tokens_per_s > wide.tokens_per_s


def test_round_and_join_of_a_billion_parameters_are_those_of_the_design() -> None:
    num_parameters = 10**9
    assert round_bytes("int8", num_parameters, 8) == pytest.approx(1.75e9, rel=0.02)
    settings = _settings("[checkpoint]\nsnapshot_every = 1\n")
    joined = plan_run(settings, [num_parameters] * 2, 4096, LINKS).stages[0].join_bytes
    assert joined == pytest.approx(12e9, rel=0.05)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("", 20.0),
        ('[optimizer]\nmoments = "int8"\n', 14.0),
        ("[averaging]\ndelay = 1\n", 24.0),
        ('[run]\ntrust = "public"\n', 28.0),
    ],
)
def test_memory_is_so_many_bytes_a_parameter(tables: str, expected: float) -> None:
    """Of the stage's parameters: activations, exhibits and messages do not grow with them."""
    items = stage_memory_bytes(_settings(tables), 10**9, 128, "cpu")
    other = ("activations", "logits", "exhibits", "messages", "libraries", "p2pd")
    grows = {name: size for name, size in items.items() if not any(word in name for word in other)}
    assert total_bytes(grows, "host") / 10**9 == pytest.approx(expected, abs=0.2)
    assert total_bytes(items, "device") == 0


def test_gpu_holds_weights_gradients_and_activations_but_no_moments() -> None:
    items = stage_memory_bytes(_settings(), 1000, 128, "cuda:0")
    on_device = {name for name in items if name.startswith("device.")}
    assert {name.partition(".")[2].split(",")[0] for name in on_device} == {
        "weights",
        "gradient sums",
        "gradient of a microbatch",
        "activations in flight",
        "gradients of activations",
        "logits and their gradient",
    }
    assert "host.moments" in items


def test_under_bf16_matrices_are_kept_rounded_beside_the_host_s_weights() -> None:
    rounded = replace(_settings(), model=replace(_settings().model, compute_dtype="bf16"))
    on_cpu, on_gpu = (stage_memory_bytes(rounded, 1000, 128, device, stage=1) for device in ("cpu", "cuda:0"))
    assert on_cpu["host.weights in bf16, 2 versions"] == on_gpu["device.weights in bf16, 2 versions"] == 4_000
    assert "device.weights, 2 versions" not in on_gpu
    assert on_cpu["host.weights, 2 versions"] == on_gpu["host.weights, 2 versions"] == 8_000
    strangers = replace(rounded, trust="public")
    assert stage_memory_bytes(strangers, 1000, 128, "cpu", stage=1)["host.weights of a replay"] == 2_000
    in_full = replace(_settings(), trust="public")
    assert "host.weights of a replay" not in stage_memory_bytes(in_full, 1000, 128, "cpu", stage=1)


def test_memory_follows_the_settings_that_decide_it() -> None:
    def item(settings: RunSettings, name: str) -> int:
        return stage_memory_bytes(settings, 1000, 128, "cpu")[name]

    plain = _settings()
    recompute = replace(plain, model=replace(plain.model, recompute=True))
    assert item(recompute, "host.activations in flight") < item(plain, "host.activations in flight") / 3
    *_, least = modes(plain)
    sliced = stage_memory_bytes(plain, 1000, 128, "cpu", mode=least)["host.activations in flight"]
    assert sliced < item(recompute, "host.activations in flight")
    sgd = replace(plain, optimizer=replace(plain.optimizer, name="sgd"))
    assert item(sgd, "host.moments") * 2 == item(plain, "host.moments")
    extrapolate = replace(plain, optimizer=replace(plain.optimizer, correction="extrapolate"))
    assert item(extrapolate, "host.weights, 3 versions") == 12_000


def test_the_last_stage_holds_inputs_alone_of_what_waits() -> None:
    in_flight = "host.activations in flight"
    for text, stages in (("", 2), ("[model]\nstages = 1", 1)):
        settings = _settings(text)
        found = [stage_memory_bytes(settings, 1000, 128, "cpu", stage=stage)[in_flight] for stage in range(stages)]
        computed = stage_memory_bytes(settings, 1000, 128, "cpu", stage=0)["host.gradients of activations"] / 1.4
        waits = settings.limits.max_in_flight if stages > 1 else 1
        inputs = waits * settings.microbatch_tokens * 128 * 4
        assert found[-1] == pytest.approx(inputs + computed, rel=1e-3)
        assert found[0] == pytest.approx(inputs + waits * computed, rel=1e-3)


def test_messages_and_p2pd_grow_with_the_members_that_a_stage_may_have() -> None:
    def items(members: int, rule: str) -> dict[str, int]:
        text = f"[limits]\nmax_peers_per_stage = {members}\n[averaging]\nrule = '{rule}'\ndelay = 1\n"
        return stage_memory_bytes(_settings(text), 10**9, 128, "cpu")

    part = 4 << 20  # of 2^20 values, as all are here but those of a stage of 64
    alone, two = items(1, "mean"), items(2, "mean")
    assert alone["host.messages"] == 3 * part
    assert two["host.messages"] - alone["host.messages"] == LEAST_LANES * MESSAGE_BYTES
    assert items(2, "median")["host.messages"] - two["host.messages"] == part
    assert items(64, "median")["host.messages"] == KEPT_FOR_MESSAGES_BYTES
    assert two["host.p2pd"] - alone["host.p2pd"] == P2PD_BYTES_A_PEER
    few = stage_memory_bytes(_settings("[averaging]\ndelay = 1\n"), 1000, 128, "cpu")["host.messages"]
    assert 0 < few < 4000, "no more than there is to send"
    between = stage_memory_bytes(_settings(), 10**9, 128, "cpu")["host.messages"]
    assert between == 0, "they have the memory of a microbatch's gradient, where nothing is computed beside a round"


@pytest.mark.parametrize("mlp_size", [256, 384, 512])
def test_activations_are_what_autograd_keeps(mlp_size: int) -> None:
    settings = _settings("[model]\nstages = 1\n[limits]\nmax_in_flight = 1")
    config = json.loads(settings.model.config_json) | {"intermediate_size": mlp_size}
    settings = replace(settings, model=replace(settings.model, config_json=canonical_config_json(config)))
    model = StageModel(settings.model, 0)
    weights = model.weights(next(initial_weights(settings.model, 0, None)))
    own = {parameter.untyped_storage().data_ptr() for parameter in weights.stack.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens_BL = torch.zeros(settings.batch.microbatch_size, settings.data.sequence_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.forward(weights, tokens_BL, keep=True)
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    planned = stage_memory_bytes(settings, 0, 128, "cpu", stage=0)["host.activations in flight"]
    assert kept_bytes == pytest.approx(planned, rel=0.15)


def test_parameters_are_those_of_the_weights() -> None:
    settings = _settings("[model]\nstage_layers = [1, 3]")
    counts = stage_num_parameters(settings.model)
    assert hidden_size(settings.model) == 128
    assert counts == [len(flat) for flat in initial_weights(settings.model, 0, None)]


def test_step_time_is_the_slowest_of_compute_and_links() -> None:
    settings = _settings("[averaging]\nrule = 'mean'")
    slow_links = replace(LASTING, uplink_mbit=0.1)
    bound = plan_run(settings, [EVEN] * 2, 128, slow_links)
    votes_s = ROUND_TRIPS * LINKS.round_trip_ms / 1000
    exact_s = EVEN * EXACT_NS["int8"] * 1e-9
    lines_s = max(part.uplink_s for part in bound.stages)
    assert bound.step_s == pytest.approx(lines_s + bound.stages[1].fill_s + votes_s + exact_s)
    slow_compute = replace(LASTING, tflops=1e-4)
    computing = plan_run(settings, [EVEN] * 2, 128, slow_compute)
    first, last = computing.stages
    slowest, other = (first, last) if first.compute_s > last.compute_s else (last, first)
    assert computing.step_s == pytest.approx(slowest.compute_s + other.fill_s + slowest.round_s)
    assert computing.tokens_per_s == pytest.approx(settings.batch.target_tokens / computing.step_s)


def test_steps_last_longer_while_somebody_takes_a_state() -> None:
    """As on lines of which that one has its share, and that are full; and as often as somebody comes."""
    settings = _settings("[averaging]\nrule = 'mean'")

    def step_s(session_hours: float, uplink_mbit: float = 1.0, **supposed: float) -> float:
        links = replace(LINKS, uplink_mbit=uplink_mbit, session_hours=session_hours, **supposed)
        return plan_run(settings, [10**6] * 2, 128, links).step_s

    undisturbed_s = step_s(1e9)
    assert undisturbed_s < step_s(48.0) < step_s(24.0) < step_s(0.01)
    assert step_s(0.01) == pytest.approx(step_s(0.001)), "there is always one that joins"
    left = (1 - join_share(LINKS.peers_per_stage)) / LINK_SHARE
    both_s = step_s(1e9, 1.0 * left)
    assert undisturbed_s < step_s(0.001) <= both_s, "of two stages one is enough"
    assert step_s(0.001) == pytest.approx(both_s, rel=0.03)
    settings = replace(settings, averaging=replace(settings.averaging, delay=1))
    assert step_s(0.001, tflops=1e-4) == pytest.approx(step_s(1e9, tflops=1e-4)), "the line is idle enough"


def test_a_synchronous_pipeline_is_filled_anew_in_every_step() -> None:
    """With s equal stages m microbatches of each peer take the time of m + s - 1, and s - 1 round trips."""
    slow = replace(LASTING, tflops=1e-4)
    settings = _settings("[model]\nstage_layers = [1, 1, 1, 1]\n[data]\nsequence_length = 1\n")
    plan = plan_run(settings, [10**7] * 4, 1, slow)
    m = settings.microbatches_per_step / LINKS.peers_per_stage
    work_s = plan.stages[1].work_s
    waits_s = 3 * LINKS.round_trip_ms / 1000
    expected = (m + 3) / m * work_s + waits_s + plan.stages[1].round_s
    assert plan.step_s == pytest.approx(expected, rel=1e-3)
    delayed = replace(settings, averaging=replace(settings.averaging, delay=1))
    assert plan_run(delayed, [10**7] * 4, 1, slow).step_s == pytest.approx(work_s + plan.stages[1].exact_s, rel=1e-3)


def test_exact_work_is_that_of_the_codec_or_what_was_measured() -> None:
    for codec in ("int8", "topk"):
        settings = _settings(f"[codecs]\naveraging = '{codec}'")
        known = plan_run(settings, [10**6] * 2, 128, LINKS).stages[0]
        told = plan_run(settings, [10**6] * 2, 128, replace(LINKS, exact_ns=100.0)).stages[0]
        assert known.exact_s == pytest.approx(EXACT_NS[codec] * 1e-3)
        assert told.exact_s == pytest.approx(0.1)
        assert told.round_s - known.round_s == pytest.approx(told.exact_s - known.exact_s)


def test_delay_hides_the_round_behind_compute() -> None:
    settings = _settings()
    delayed = replace(settings, averaging=replace(settings.averaging, delay=1))
    slow_compute = replace(LINKS, tflops=1e-3)
    parts = plan_run(settings, [10**6] * 2, 128, slow_compute).stages
    hidden_s = plan_run(delayed, [10**6] * 2, 128, slow_compute).step_s
    assert hidden_s == pytest.approx(max(part.work_s + part.exact_s for part in parts))
    assert plan_run(settings, [10**6] * 2, 128, slow_compute).step_s > hidden_s


def test_ends_of_the_pipeline_send_one_way_only() -> None:
    settings = _settings("[model]\nstages = 3\n[codecs]\nactivations = 'fp32'\nactivation_gradients = 'bf16'")
    first, middle, last = plan_run(settings, [10**6] * 3, 100, LINKS).stages
    tokens = settings.batch.target_tokens / LINKS.peers_per_stage
    assert [part.activation_up_bytes / tokens for part in (first, middle, last)] == [404, 604, 200]
    assert [part.activation_down_bytes / tokens for part in (first, middle, last)] == [200, 604, 404]


def test_round_longer_than_its_step_is_warned_of_with_the_batch_that_would_do() -> None:
    settings = _settings()
    plan = plan_run(settings, [10**7] * 2, 128, LINKS)
    assert len(plan.warnings) == 2
    assert "stage 0: a round takes" in plan.warnings[0]
    enough = int(plan.warnings[0].partition(" to ")[2].partition(",")[0])
    larger = replace(settings, batch=replace(settings.batch, target_tokens=enough))
    assert not [text for text in plan_run(larger, [10**7] * 2, 128, LINKS).warnings if "stage 0" in text]


@pytest.mark.parametrize(("num_parameters", "refused"), [(20_000_000, False), (2_000_000_000, True)])
def test_join_longer_than_a_tenth_of_a_session_is_refused(num_parameters: int, refused: bool) -> None:
    plan = plan_run(_settings(), [10**6, num_parameters], 4096, LINKS)
    assert bool(plan.refusals) == refused
    if refused:
        assert "stage 1: joining moves" in plan.refusals[0]
        assert "a tenth of the 4 h" in plan.refusals[0]


def test_month_is_what_the_steps_of_a_month_move() -> None:
    plan = plan_run(_settings(), [10**6] * 2, 128, LINKS)
    part = plan.stages[0]
    step_bytes = np.sum(
        [part.round_up_bytes, part.round_down_bytes, part.activation_up_bytes, part.activation_down_bytes]
    )
    assert plan.month_bytes[0] == pytest.approx(step_bytes * HEADERS * 30 * 86400 / plan.step_s)


def test_a_round_takes_its_messages_with_their_headers_and_its_round_trips() -> None:
    far, settings = replace(LINKS, round_trip_ms=200.0), _settings("[audits]\nreducer_share = 0.0")
    near, distant = (plan_run(settings, [EVEN] * 2, 128, links).stages[0] for links in (LINKS, far))
    assert distant.round_s - near.round_s == pytest.approx(ROUND_TRIPS * 0.16)
    line_s = near.round_up_bytes * HEADERS * 8 / (LINKS.uplink_mbit * 1e6) / LINK_SHARE
    assert near.round_s == pytest.approx(line_s + ROUND_TRIPS * 0.04 + near.exact_s)
    alone = plan_run(settings, [EVEN] * 2, 128, replace(far, peers_per_stage=1)).stages[0]
    assert alone.round_s == alone.exact_s


def test_a_round_lasts_as_long_as_who_reduces_most_needs() -> None:
    """Of four parts and eight members four reduce one each, and send it to seven."""
    settings = _settings("[audits]\nreducer_share = 0.0")
    uneven, even = (plan_run(settings, [size] * 2, 128, LINKS).stages[0] for size in (EVEN // 2, EVEN))
    values, result = EVEN / 2, RESULT_BYTES["int8"]
    line_s = values * (0.75 * CONTRIBUTION_BYTES["int8"] + 0.25 * 7 * result) / LINKS.up_bytes_per_s
    assert uneven.round_s == pytest.approx(line_s + ROUND_TRIPS * 0.04 + uneven.exact_s)
    assert slowest_round_bytes(settings, EVEN, 8) == even.round_up_bytes
    assert slowest_round_bytes(settings, EVEN, 1) == 0
    assert slowest_round_bytes(settings, 10**9, 8) < 1.005 * round_bytes("int8", 10**9, 8)
    assert slowest_round_bytes(settings, 10**9, 128) < 1.1 * round_bytes("int8", 10**9, 64), "to those of its cohort"


def test_with_a_delay_who_reduces_most_sends_that_and_its_activations_over_one_line() -> None:
    settings = _settings("[averaging]\ndelay = 1\nsync_steps = 0\n[audits]\nreducer_share = 0.0")
    plan = plan_run(settings, [EVEN // 2] * 2, 2048, LASTING)
    busiest = max(plan.stages, key=lambda part: part.uplink_s)
    assert busiest.uneven_bytes > 0
    assert plan.step_s == pytest.approx(busiest.uplink_s + busiest.uneven_bytes / LASTING.up_bytes_per_s)


def test_what_recomputes_parts_takes_the_line_that_work_leaves_idle_and_then_the_rounds() -> None:
    """Four parts of a small stage in each version, one in twenty of a large one; of each all others' inputs."""
    small = plan_run(_settings(), [10**6] * 2, 128, LINKS).stages[0]
    part_bytes = CONTRIBUTION_BYTES["int8"] * 10**6 / 4
    assert small.audit_up_bytes == pytest.approx(4 * 7 / 8 * part_bytes)
    large = plan_run(_settings(), [10**9] * 2, 128, LINKS).stages[0]
    assert large.audit_up_bytes == pytest.approx(0.05 * 7 / 8 * CONTRIBUTION_BYTES["int8"] * 10**9)
    unaudited = _settings("[audits]\nreducer_share = 0.0")
    audit_s = small.audit_up_bytes / LINKS.up_bytes_per_s
    for tflops, beside_s in ((1e9, audit_s), (1e-3, 0.0)):
        links = replace(LINKS, tflops=tflops)
        audited_s, without_s = (
            plan_run(one, [10**6] * 2, 1, links).stages[0].round_s for one in (_settings(), unaudited)
        )
        assert audited_s - without_s == pytest.approx(beside_s, rel=0.01)


def test_a_cut_that_memory_is_too_small_for_is_computed_sample_by_sample_or_not_at_all() -> None:
    settings = _settings()
    numbers, width = stage_num_parameters(settings.model), hidden_size(settings.model)

    def cut(memory: Memory) -> Cut:
        return plan_cut(settings, numbers, width, LINKS, num_peers=16, memory=memory)

    plenty = cut(Memory(1 << 40))
    assert plenty.tokens_per_s == plan_run(settings, numbers, width, LINKS).tokens_per_s
    less = cut(Memory(plenty.needs.host_bytes - 1))
    assert less.needs.host_bytes < plenty.needs.host_bytes
    assert not less.problem
    poor = cut(Memory(less.needs.host_bytes - 1))
    assert poor.lacks == "memory"
    assert poor.problem.startswith("needs ")
    with_gpu = cut(Memory(1 << 40, 1 << 30))
    assert with_gpu.needs.host_bytes < plenty.needs.host_bytes
    assert cut(Memory(1 << 40, with_gpu.needs.device_bytes // 8)).lacks == "memory"


def test_fleet_is_shown_modes_side_by_side_and_what_chooses_the_best(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA_1B)
    manifest = tmp_path / "run.toml"
    manifest.write_text('[model]\nconfig = "config.json"\nstages = 4\n[batch]\ntarget_tokens = 524288\n')
    fleet = ["--fleet", "16", "--tflops", "60", "--memory-gib", "96", "--gpu-memory-gib", "40", "--session-hours", "12"]
    shown = CliRunner().invoke(command, [str(manifest), *fleet])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.output
    assert "recommended: windows of 30, ahead" in lines
    assert lines[-4:] == [
        "set model.stages = 1",
        "set averaging.delay = 1",
        "set averaging.local_steps = 30",
        'set codecs.averaging = "int2"',
    ]
    told = json.loads(CliRunner().invoke(command, [str(manifest), *fleet, "--json"]).output)
    best = told["best"]
    assert best["times_alone"] == max(mode["times_alone"] for mode in told["modes"] if not mode["problem"])
    assert best["times_alone"] > 1 > max(mode["times_alone"] for mode in told["modes"] if mode["local_steps"] == 1)
    assert not [mode for mode in told["modes"] if mode["local_steps"] > 1 and mode["num_stages"] > 1], "no host runs it"
    manifest.write_text(manifest.read_text() + '[run]\ntrust = "public"\n')
    public = CliRunner().invoke(command, [str(manifest), *fleet]).output.splitlines()
    assert "recommended: windows of 30" in public, "whose windows are audited waits for its rounds"
    assert not [line for line in public if "ahead" in line]


def test_run_takes_its_steps_and_moves_its_bytes() -> None:
    settings = _settings()
    plan = plan_run(settings, stage_num_parameters(settings.model), hidden_size(settings.model), LINKS)
    assert plan.run_s == pytest.approx(plan.step_s * settings.optimizer.total_steps)
    for part, month, whole in zip(plan.stages, plan.month_bytes, plan.run_bytes, strict=True):
        assert whole == pytest.approx(month * plan.run_s / (30 * 24 * 3600) + part.join_bytes)


def test_windows_need_memory_for_themselves_and_in_public_for_their_replays() -> None:
    window = "[model]\nstages = 1\n[averaging]\nlocal_steps = 10\n[codecs]\naveraging = 'int2'\n"

    def needs(text: str) -> dict[str, int]:
        return stage_memory_bytes(_settings(text), 10**9, 64, "cpu")

    friends, public = needs(window), needs(f"[run]\ntrust = 'public'\n{window}")
    assert friends["host.moments"] == pytest.approx(0.28e9, rel=0.01), "of a state, as a result has them"
    assert total_bytes(friends, "host") == pytest.approx(28.5e9, rel=0.02)
    assert total_bytes(public, "host") - total_bytes(friends, "host") == pytest.approx(24.2e9, rel=0.02)


def _verdict(settings: RunSettings, num_parameters: list[int], links: Assumptions) -> Verdict:
    return verdict_on(settings, num_parameters, 2048, links, plan_run(settings, num_parameters, 2048, links))


def test_sixteen_fast_machines_on_home_lines_are_slower_than_one_and_slow_ones_are_not() -> None:
    settings = _settings("[model]\nstage_layers = [1, 1, 1, 1]\n[batch]\ntarget_tokens = 524288")
    fleet = replace(LINKS, peers_per_stage=4)
    bad = _verdict(settings, [275_000_000] * 4, replace(fleet, tflops=60, session_hours=1e9))
    assert not bad.is_good
    assert 1 / bad.times_alone == pytest.approx(9, rel=0.15), "a stage's hops, 1 kB a token, on 20 Mbit/s"
    come_and_go = _verdict(settings, [275_000_000] * 4, replace(fleet, tflops=60))
    assert 1 / come_and_go.times_alone == pytest.approx(9 * LINK_SHARE / (1 - 1 / 3), rel=0.15), (
        "somebody always takes a state of 3.3 GB, and fills the line"
    )
    assert bad.told().startswith("SLOWER than one such machine alone, at 0.1")
    assert "bound by activations on the lines; " in bad.told()
    good = _verdict(settings, [275_000_000] * 4, replace(fleet, tflops=0.5))
    assert 8 < good.times_alone < 16, "no more than there are machines"
    assert good.told().startswith("faster than one such machine alone by ")
    assert good.told().endswith("bound by computing")


def test_the_verdict_on_windows_counts_tokens_by_what_they_are_worth() -> None:
    settings = _settings("[model]\nstages = 1\n[averaging]\nlocal_steps = 10\n[batch]\ntarget_tokens = 524288")
    links = replace(LINKS, peers_per_stage=4, tflops=60)
    plan = plan_run(settings, [10**8], 2048, links)
    found = verdict_on(settings, [10**8], 2048, links, plan)
    assert found.worth == pytest.approx(2.50 / 4)
    alone = tokens_per_s_alone(settings, [10**8], 2048, links)
    assert found.times_alone == pytest.approx(found.worth * plan.tokens_per_s / alone)
    assert "a token of a window counted as 0.62" in found.told()
    # A quarter of the bytes, and the batch grows less.
    slow = replace(links, uplink_mbit=5)
    advice = verdict_on(settings, [10**8], 2048, slow, plan_run(settings, [10**8], 2048, slow)).advice
    assert advice.startswith('try averaging.delay = 1, codecs.averaging = "int2"')
    strangers = replace(settings, trust="public")
    advice = verdict_on(strangers, [10**8], 2048, slow, plan_run(strangers, [10**8], 2048, slow)).advice
    assert advice.startswith('try codecs.averaging = "int2"'), "their windows are audited"


def test_what_the_verdict_advises_makes_the_swarm_faster_than_one() -> None:
    settings = _settings()
    slow = replace(LINKS, tflops=0.06)
    bad = _verdict(settings, [10**6] * 2, slow)
    assert bad.advice.startswith("try ")
    assert "averaging.delay = 1" in bad.advice
    text, _, times = bad.advice.removeprefix("try ").rpartition(": ")
    tables: dict[str, list[str]] = {}
    for change in text.split(", "):
        name, _, value = change.partition(" = ")
        table, _, field = name.partition(".")
        tables.setdefault(table, []).append(f"{field} = {value}")
    changed = _settings("\n".join(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()))
    better = _verdict(changed, [10**6] * 2, slow)
    assert better.is_good
    assert f"{better.times_alone:.2g}x" == times


def test_where_no_setting_helps_the_verdict_names_the_links_that_would() -> None:
    settings = _settings()
    fast = replace(LINKS, tflops=60)
    bad = _verdict(settings, [10**6] * 2, fast)
    assert "the most that settings give is " in bad.advice
    assert "it takes links of " in bad.advice or "no links make it faster" in bad.advice


def test_a_plan_of_sixteen_stages_can_be_read_in_a_narrow_terminal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA_1B)
    manifest = tmp_path / "run.toml"
    manifest.write_text('[model]\nconfig = "config.json"\nstages = 16\n')
    shown = CliRunner().invoke(command, [str(manifest), "--session-hours", "100"])
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0].startswith("SLOWER than one such machine alone")
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.output
    rows = [line.strip().split("  ")[0] for line in lines if " to " in line[:10]]
    assert rows == ["1 to 8", "9 to 14"] * 3, "stages that need the same share a row, in each of three tables"


def test_donors_uplinks_are_shared_with_rounds_and_with_all_who_join() -> None:
    settings = _settings("[batch]\ntarget_tokens = 1048576\n")
    alone = replace(LINKS, session_hours=10_000)
    join_s = [plan_run(settings, [10**8] * 2, 1024, links).stages[0].join_s for links in (alone, LINKS)]
    assert join_s[0] < join_s[1] < 2.5 * join_s[0]
    often = plan_run(settings, [10**8] * 2, 1024, replace(LINKS, session_hours=0.5)).stages[0]
    assert often.join_s > 1.5 * join_s[0]
    busy = _settings("[batch]\ntarget_tokens = 8192\n")
    three = replace(alone, peers_per_stage=3)
    comes_s = []
    for given in (settings, busy):
        before = plan_run(given, [10**8] * 2, 1024, replace(three, peers_per_stage=2))
        # But for half of a step, which the newcomer waits for, and which is a long one where there is much work.
        comes_s.append(plan_run(given, [10**8] * 2, 1024, three).stages[0].join_s - before.step_s / 2)
    assert comes_s[1] > comes_s[0]


def test_who_joins_has_all_results_by_the_time_that_the_plan_says() -> None:
    """Results that are made while it catches up are counted once: the plan was three times too dark."""
    settings = _settings("[batch]\ntarget_tokens = 8192\n")
    links = replace(LINKS, peers_per_stage=4, session_hours=10_000)
    joined = plan_run(settings, [10**8] * 2, 1024, links).stages[0]
    before = plan_run(settings, [10**8] * 2, 1024, replace(links, peers_per_stage=3))
    part, share = before.stages[0], 1 / 3  # of each donor's uplink, which two others have the rest of
    full_line_s = [LINK_SHARE * one.uplink_s for one in before.stages]  # what rounds leave idle is filled
    no_line_s = before.step_s - max(one.uplink_s for one in before.stages)
    step_s = max(full_line_s) / (1 - share) + no_line_s
    line_per_s = links.up_bytes_per_s / LINK_SHARE
    per_s = min(links.down_bytes_per_s, 3 * line_per_s * max(share, 1 - full_line_s[0] / step_s))
    result_s = RESULT_BYTES["int8"] * part.num_parameters / per_s
    now, behind = part.join_bytes / per_s, 0.0
    behind = now // step_s
    while behind:
        begun, now = now, now + result_s
        behind += now // step_s - begun // step_s - 1
    assert joined.join_s == pytest.approx(now + step_s / 2 + part.round_s - result_s, rel=0.1)


def test_what_peers_would_give_up_is_refused_before_it_begins() -> None:
    settings, sizes = _settings("[deadlines]\nleast_mbit = 10\n"), [10**8] * 2
    plan = plan_run(settings, sizes, 1024, replace(LINKS, uplink_mbit=2, session_hours=10_000))
    assert any("deadlines.least_mbit = 10" in refusal for refusal in plan.refusals)
    assert all(part.round_s > part.longest_round_s for part in plan.stages)
    assert any("slower than deadlines.least_mbit" in warning for warning in plan.warnings)
    enough = plan_run(settings, sizes, 1024, replace(LINKS, session_hours=10_000))
    assert not [refusal for refusal in enough.refusals if "least_mbit" in refusal]
    assert not [warning for warning in enough.warnings if "least_mbit" in warning]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_that_no_joiner_could_catch_up_with_is_refused(delay: int) -> None:
    tables = f"[checkpoint]\nsnapshot_every = 1\n[batch]\ntarget_tokens = 8192\n[averaging]\ndelay = {delay}\n"
    tables += '[codecs]\naveraging = "int4"\n'
    links = replace(LINKS, peers_per_stage=3, session_hours=10_000)
    refusals = plan_run(_settings(tables), [10**8] * 2, 1024, links).refusals
    assert any("keeps the results of 5" in refusal for refusal in refusals), refusals


def test_what_peers_of_a_machine_have_together_counts_once() -> None:
    items = {"host.libraries": 1, "host.weights": 10, "disk.the run's tokens": 100, "disk.states": 1000}
    assert [total_bytes(items, "host", number) for number in (1, 2)] == [11, 21]
    assert [total_bytes(items, "disk", number) for number in (1, 2)] == [1100, 2100]
