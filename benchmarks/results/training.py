"""Figures of training: a whole run, one process, speed, staleness, rounds and codecs."""

from collections.abc import Sequence

from benchmarks.results.entry import SWARM, Command, Entry, Figures, Row, must, object_of, passed


def _demo(answers: Sequence[str]) -> Figures:
    report = object_of(answers[0])
    loss = report["held_out_loss"]
    must(loss["end"] < loss["bigram"], "the loss ends below a bigram's")
    must(all(len(set(ends.values())) == 1 for ends in report["state_digests"].values()), "replicas are equal")
    must(sum(peer["killed_at"] is not None for peer in report["peers"]) == 1, "one peer is killed")
    single = object_of(answers[1])["held_out_loss"]
    return {
        "million_tokens": report["tokens"] / 1e6,
        "seconds": report["wall_seconds"],
        **{f"loss_{name}": loss[name] for name in ("start", "end", "bigram")},
        **{"loss_single": single, "swarm_over_single": loss["end"] / single},
    }


def _throughput(answers: Sequence[str]) -> Figures:
    ratios = object_of(answers[0])["ratios"]
    return {"ratio": object_of(answers[0])["ratio"], "least": min(ratios), "most": max(ratios), "pairs": len(ratios)}


def _stale(answers: Sequence[str]) -> Figures:
    rows = {row["stale_share"]: row["held_out_loss"] for row in object_of(answers[0])["rows"]}
    must(rows[0.25]["nadamw"] < rows[0.0]["none"], "a quarter stale is below plain AdamW")
    return {"percent_over_synchronous": 100 * (rows[0.25]["nadamw"] / rows[0.0]["nadamw"] - 1)}


def _averaging(answers: Sequence[str]) -> Figures:
    sides = object_of(answers[0])
    ours, gloo = sides["ours"]["int8"], sides["gloo"]["fp32"]
    theirs = [cell for codec, cell in sides["hivemind"].items() if "8BIT" in codec and "seconds" in cell]
    fastest = min(theirs, key=lambda cell: float(cell["seconds"]))
    must(ours["replicas_equal"], "replicas are equal")
    return {
        "seconds": ours["seconds"],
        "hivemind_seconds": fastest["seconds"],
        "hivemind_error_over_ours": fastest["relative_error"] / ours["relative_error"],
        "gloo_seconds": gloo["seconds"],
    }


def _codecs(answers: Sequence[str]) -> Figures:
    rows = {row["case"]: row["over_exact"] for row in object_of(answers[0])["rows"]}
    cases = [case for case in rows if case != "exact"]
    return {case.replace(" ", "_"): 100 * (rows[case] - 1) for case in cases}


TRAINING = (
    Entry(
        name="demo",
        commands=(
            Command("make demo", "--report answer.json"),
            Command("python -m benchmarks.single_process --newest-demo"),
        ),
        read=_demo,
        measures=("bootstrap.demo.command", "benchmarks.single_process", *SWARM),
        minutes=3.5,
        rows=(
            Row(
                "the demo: 4 peers, one killed, {million_tokens:.2f} M tokens",
                "{seconds:.0f} s in all; held-out loss {loss_start:.2f} -> {loss_end:.2f} nats a byte, below a byte "
                "bigram's {loss_bigram:.2f}; replicas equal to the last bit",
                "`make demo`",
            ),
            Row(
                "one process on the same tokens",
                "{loss_single:.2f}: the swarm ends at {swarm_over_single:.2f} of it",
                "`python -m benchmarks.single_process --newest-demo`, after `make demo`",
            ),
        ),
    ),
    Entry(
        name="exactness",
        commands=(Command("make test TESTS=tests/peer/round/test_equivalence.py", ""),),
        read=passed,
        measures=("tests.peer.round.test_equivalence",),
        minutes=1,
        rows=(
            Row(
                "exact codecs against plain PyTorch, 20 steps of AdamW and SGD",
                "gradients within 1e-5, weights and loss within 1e-4",
            ),
        ),
    ),
    Entry(
        name="throughput",
        commands=(Command("python -m benchmarks.training_throughput --pairs 3"),),
        read=_throughput,
        measures=("benchmarks.training_throughput", "benchmarks.single_process", *SWARM),
        minutes=4,
        rows=(
            Row(
                "2 peers with default settings against one process of 2 threads, 22.8 M parameters",
                "{ratio:.2f} times its tokens/s (median of {pairs:.0f} pairs, {least:.2f} to {most:.2f}), int8, one "
                "step's delay",
            ),
        ),
    ),
    Entry(
        name="stale share",
        commands=(Command("python -m benchmarks.round.stale_share --quarter"),),
        read=_stale,
        measures=("benchmarks.round.stale_share",),
        minutes=5,
        rows=(
            Row(
                "a quarter of each step stale, NAdamW, 2 seeds",
                "{percent_over_synchronous:+.1f} % against synchronous NAdamW, below plain AdamW "
                "([other shares](docs/delayed_updates.md))",
            ),
        ),
    ),
    Entry(
        name="averaging",
        commands=(
            Command(
                "python -m benchmarks.round.averaging --ours int8 "
                "--hivemind UNIFORM_8BIT,QUANTILE_8BIT,BLOCKWISE_8BIT --passes 2"
            ),
        ),
        read=_averaging,
        measures=("benchmarks.round.averaging", "benchmarks.round.averaging_ours"),
        minutes=2.5,
        rows=(
            Row(
                "a round of 25 M values among 3 peers, int8, encrypted, replicas equal",
                "{seconds:.3f} s; hivemind's fastest 8-bit codec {hivemind_seconds:.2f} s with "
                "{hivemind_error_over_ours:.1f} times the error, gloo {gloo_seconds:.2f} s in the clear "
                "([all codecs](docs/averaging.md))",
            ),
        ),
    ),
    Entry(
        name="codecs",
        commands=(Command("python -m benchmarks.round.codecs_in_training --seeds 1 --tokens 76800"),),
        read=_codecs,
        measures=("benchmarks.round.codecs_in_training",),
        minutes=4.5,
        rows=(
            Row(
                "held-out loss over fp32's at equal tokens, 76,800 of them, 1 seed",
                "averaging int8 {averaging_int8:+.2f} %, int4 {averaging_int4:+.1f} %, topk {averaging_topk:+.1f} %; "
                "activations int8 {activations_int8:+.2f} %, int4 {activations_int4:+.1f} % ([3 "
                "seeds](docs/codecs.md))",
            ),
        ),
    ),
)
