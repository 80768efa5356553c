"""What verification costs, with both sides in one run.

    python -m benchmarks.verification.verification_cost [--json] [--replicas 2] [--pairs 3]

- **papers**: headers, hashes and signatures of a microbatch at a stage, against the computing of it, one thread;
- **audits**: what a replica spends on replays at 4, 8 and 32 replicas: the default draws over many steps, each at
  the measured time of what an audit does, against its own work;
- **swarm**: tokens/s and bytes a token of a real swarm (host and peers, each a process) with trust "public" against
  "friends", in alternating pairs.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.training_throughput import READY_S, Events, running
from bootstrap.state.run_folder import prepare_run
from swarm.averaging.activations import activation_codec
from swarm.averaging.codecs import vector_codec
from swarm.averaging.parts import Parts
from swarm.bulk_digest import bulk_digest
from swarm.core.audit.hash_chain import HashChain
from swarm.core.canonical import digest
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.settings import RunSettings
from swarm.identity.key import Identity
from swarm.manifest.file import parse_manifest
from swarm.model.stage import StageModel
from verification.audit.draws import AuditBudget, contribution_rate, draw, hop_draw, microbatch_rate
from verification.audit.tolerance import bounds_for, compare
from verification.pipeline.headers import BirthRecord, HopHeader, check_birth, check_hop, forward_parents

PAPERS_GOAL, AUDITS_GOAL = 0.05, 0.20
REPLICAS = (4, 8, 32)
EACH = (4, 1)
"""Microbatches a replica does in a step."""
STEPS, SMOKE_STEPS = 2000, 20
"""Of draws."""
REPEATS = 15

MANIFEST = """\
[run]
name = "verification-cost"
trust = "{trust}"
[model]
preset = "{preset}"
stages = 2
[data]
max_text_mb = 8
[batch]
microbatch_size = 4
target_tokens = {target_tokens}
[optimizer]
total_steps = 100000
[checkpoint]
every_steps = 80000
snapshot_every = 8
[limits]
founders_per_stage = {replicas}
"""


def seconds_of(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, the median of some repeats."""
    work()
    found = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        found.append(time.thread_time() - started)
    return statistics.median(found)


def measure_units(settings: RunSettings, weights: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, float]:
    """CPU seconds of what a replica of the last but one stage does, on one thread."""
    torch.set_num_threads(1)
    stage = settings.model.num_stages - 2
    model = StageModel(settings.model, stage)
    held = model.weights(weights)
    shape = (settings.batch.microbatch_size, settings.data.sequence_length, model.hidden_size)
    codec, gradient_codec = (
        activation_codec(settings.codecs.activations),
        activation_codec(settings.codecs.activation_gradients),
    )
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randint(0, settings.data.vocab_size, shape[:2], generator=generator)
        if model.is_first
        else torch.randn(shape, generator=generator)
    )
    grad_y = torch.randn(shape, generator=generator) * 1e-3
    encoded_grad_y, into = gradient_codec.encode(grad_y), torch.zeros(model.layout.num_values)

    def work() -> bytearray:
        y, saved = model.forward(held, x, keep=True)
        assert saved is not None
        body = codec.encode(y)
        grad_x = model.backward(saved, gradient_codec.decode(encoded_grad_y, shape), into)
        if grad_x is not None:
            gradient_codec.encode(grad_x)
        return body

    body = work()
    source, me, consumer = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
    tokens = np.zeros(shape[:2], dtype="<i4").tobytes()

    def birth() -> BirthRecord:
        return BirthRecord(
            run_id="ab" * 32,
            source=source.peer_id,
            kind="train",
            microbatch_id=MicrobatchId(7),
            attempt=0,
            step=Step(3),
            shape=shape[:2],
            num_targets=shape[0] * shape[1],
            tokens_digest=hashlib.sha256(tokens).digest(),
            targets_digest=hashlib.sha256(tokens).digest(),
        ).signed_by(source)

    def header(maker: Identity, to: PeerId, of: BirthRecord, wire: bytes | bytearray, parent: bytes) -> HopHeader:
        return HopHeader(
            run_id="ab" * 32,
            stage=StageIndex(1),
            version=Version(3),
            microbatch_id=MicrobatchId(7),
            attempt=0,
            direction="forward",
            producer=maker.peer_id,
            consumer=to,
            parents=(of.digest(), parent),
            shape=shape,
            dtype="fp32",
            codec=codec.name,
            numeric_class="torch/cpu/fp32",
            body_digest=bulk_digest(wire),
        ).signed_by(maker)

    born = birth()
    came = header(source, me.peer_id, born, body, bytes(32))

    def papers() -> None:
        """What a middle stage does: checks what came both ways, signs what goes both ways."""
        check_birth(born, run_id=born.run_id)
        for _ in range(2):
            check_hop(
                came,
                born,
                body,
                sender=source.peer_id,
                consumer=me.peer_id,
                stage=StageIndex(1),
                direction="forward",
                shape=shape,
                codec=codec.name,
                parents=forward_parents(born.digest(), 1),
                delay=1,
            )
            header(me, consumer.peer_id, born, body, came.digest())

    gradient = np.full(model.layout.num_values, 1e-3, np.float32)
    averaging = vector_codec(settings.codecs.averaging)
    parts = list(Parts(len(gradient)))
    into_parts = np.empty_like(gradient)

    def compare_contribution() -> None:
        """What a contribution's audit does besides replays: encode, hash, decode twice, compare."""
        for where in parts:
            one = averaging.encode(gradient[where], seed=bytes(32))
            bulk_digest(one)
            averaging.decode(one, into_parts[where])
            averaging.decode(one, into_parts[where])
        compare(into_parts, gradient, bounds_for("fp32", averaging.name, "contribution"))

    def compare_hop() -> None:
        """What a hop's audit does besides the replay, of y and of the gradient of x: decode both, compare."""
        for wire in (codec, gradient_codec):
            claimed, replayed = (wire.decode(wire.encode(grad_y), shape).numpy() for _ in range(2))
            compare(claimed, replayed, bounds_for("fp32", wire.name, "activation"))

    return {
        "microbatch_s": seconds_of(work),
        "papers_s": seconds_of(papers),
        "compare_hop_s": seconds_of(compare_hop),
        "compare_contribution_s": seconds_of(compare_contribution),
        "papers_bytes": float(len(json.dumps([str(born.to_value()), str(came.to_value())]))),
        "body_bytes": float(len(body)),
    }


def audit_share(
    settings: RunSettings, units: dict[str, float], replicas: int, each: int, steps: int
) -> dict[str, float]:
    """What one replica spends on audits over many steps of the default draws, as a share of its own work of `each`
    microbatches a step."""
    budget = AuditBudget.of_run(settings.audits)
    chain = HashChain(bytes(32), steps)
    me, others = PeerId("auditor"), [PeerId(f"target {number}") for number in range(replicas - 1)]
    hops = contributions = 0
    for step in range(steps):
        value = chain.reveal(step)
        for target in others:
            drawn = draw(value, digest("benchmark", [step, target]), auditor=me, target=target)
            contributions += drawn.hits_contribution(contribution_rate(replicas, budget))
            for number in range(each):
                drawn = hop_draw(value, MicrobatchId(step * each + number), auditor=me, target=target)
                hops += drawn.hits_hop(microbatch_rate(replicas, budget))
    replays = hops + each * contributions
    spent = replays * (units["microbatch_s"] + units["papers_s"])
    spent += contributions * units["compare_contribution_s"] + hops * units["compare_hop_s"]
    own = steps * each * units["microbatch_s"]
    return {
        "replicas": replicas,
        "microbatches_each": each,
        "share_of_compute": spent / own,
        "replays_a_step": replays / steps,
        "hop_audits_a_step": hops / steps,
        "contribution_audits_a_step": contributions / steps,
    }


def measure_swarm(folder: Path, manifest: str, replicas: int, *, skip: int, seconds: float) -> dict[str, float]:
    """Tokens/s and bytes a token of a real swarm from version `skip` on."""
    folder.mkdir()
    (folder / "run.toml").write_text(manifest)
    swarm = str(Path(sys.executable).parent / "swarm")
    host = [
        swarm,
        "host",
        str(folder / "run.toml"),
        "--dir",
        str(folder / "host"),
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--ends-with-run",
    ]
    with ExitStack() as stack:
        hosting = stack.enter_context(
            running([*host, "--evaluate-tokens", "1"], folder / "host.log", stdout=subprocess.PIPE)
        )
        events = Events(hosting)
        address = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["addresses"][0]
        for number in range(2 * replicas):
            own = ["--stage", str(number % 2), "--dir", str(folder / f"peer{number}"), "--threads", "1"]
            peer = [swarm, "join", address, "--yes", "--listen", "127.0.0.1:0", *own]
            stack.enter_context(running(peer, folder / f"peer{number}.log"))
        first = events.wait_for(lambda event: event.get("version", -1) >= skip, timeout_s=READY_S)
        last = events.wait_for(
            lambda event: event["event"] == "version" and event["at"] >= first["at"] + seconds,
            timeout_s=READY_S + seconds,
        )
    inside = [
        event
        for event in events.seen
        if event["event"] == "step" and first["version"] <= event["step"] < last["version"]
    ]
    tokens = sum(event["num_targets"] for event in inside if event["stage"] == 0)
    sent: dict[str, list[float]] = {}
    for event in inside:
        sent.setdefault(event["peer_id"], []).append(event["sent_bytes"])
    return {
        "tokens_per_s": tokens / (last["at"] - first["at"]),
        "bytes_per_token": sum(max(values) - min(values) for values in sent.values()) / tokens,
    }


@click.command()
@click.option("--preset", default="small", show_default=True)
@click.option("--target-tokens", default=4096, show_default=True)
@click.option("--replicas", type=click.IntRange(min=2), default=2, show_default=True, help="Of the real swarm.")
@click.option("--pairs", type=click.IntRange(min=0), default=3, show_default=True, help="Of real swarms; 0: none.")
@click.option("--seconds", type=click.FloatRange(min=1), default=20.0, show_default=True)
@click.option("--smoke", is_flag=True, help="A small model and few draws, no swarms: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    preset: str, target_tokens: int, replicas: int, pairs: int, seconds: float, smoke: bool, as_json: bool
) -> None:
    """What verification costs."""
    steps = SMOKE_STEPS if smoke else STEPS
    if smoke:
        preset, pairs = "tiny", 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def manifest_of(trust: str) -> str:
            return MANIFEST.format(trust=trust, preset=preset, target_tokens=target_tokens, replicas=replicas)

        run = prepare_run(
            parse_manifest(manifest_of("public"), folder / "run.toml"), folder / "prepared", lambda what: None
        )
        units = measure_units(run.settings, run.states[-2].weights)
        result: dict[str, Any] = {
            "units": units,
            "papers_share": units["papers_s"] / units["microbatch_s"],
            "papers_goal": PAPERS_GOAL,
            "audits": [audit_share(run.settings, units, number, each, steps) for each in EACH for number in REPLICAS],
            "audits_goal": AUDITS_GOAL,
            "pairs": [],
        }
        for number in range(pairs):
            sides = {}
            for trust in ("friends", "public") if number % 2 == 0 else ("public", "friends"):
                made = measure_swarm(folder / f"{trust}{number}", manifest_of(trust), replicas, skip=4, seconds=seconds)
                sides[trust] = made
            ratio = sides["public"]["tokens_per_s"] / sides["friends"]["tokens_per_s"]
            more = sides["public"]["bytes_per_token"] / sides["friends"]["bytes_per_token"] - 1
            result["pairs"].append({**sides, "ratio": ratio, "more_bytes": more})
            if not as_json:
                click.echo(f"pair {number + 1} of {pairs}: {ratio:.3f} of the tokens/s, {more:+.1%} bytes", err=True)
        if pairs:
            result["tokens_per_s_ratio"] = statistics.median(pair["ratio"] for pair in result["pairs"])
            result["more_bytes"] = statistics.median(pair["more_bytes"] for pair in result["pairs"])
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"papers: {result['papers_share']:.1%} of the computing of a microbatch (goal {PAPERS_GOAL:.0%})")
    for one in result["audits"]:
        click.echo(
            f"audits at {one['replicas']:2} replicas of {one['microbatches_each']} microbatches each: "
            f"{one['share_of_compute']:.1%} of a replica's own computing "
            f"(goal {AUDITS_GOAL:.0%}), {one['replays_a_step']:.2f} replays a step"
        )
    if pairs:
        click.echo(f"swarm of {replicas} replicas: {result['tokens_per_s_ratio']:.3f} of the tokens/s without audits")
        click.echo(f"  and {result['more_bytes']:+.1%} bytes a token")


if __name__ == "__main__":
    main()
