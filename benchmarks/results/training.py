"""Figures of training: a whole run, one process, speed, staleness, rounds and codecs."""

from collections.abc import Sequence

from benchmarks.results.entry import SWARM, Command, Entry, Figures, Row, must, object_of, passed

DEMO = Command("make demo", "--report answer.json")


def _demo(answers: Sequence[str]) -> Figures:
    report = object_of(answers[0])
    loss = report["held_out_loss"]
    must(loss["end"] < loss["bigram"], "the loss ends below a bigram's")
    must(all(len(set(ends.values())) == 1 for ends in report["state_digests"].values()), "replicas are equal")
    must(sum(peer["killed_at"] is not None for peer in report["peers"]) == 1, "one peer is killed")
    return {
        "million_tokens": report["tokens"] / 1e6,
        "seconds": report["wall_seconds"],
        **{f"loss_{name}": loss[name] for name in ("start", "end", "bigram")},
    }


def _single(answers: Sequence[str]) -> Figures:
    loss = object_of(answers[1])["held_out_loss"]
    return {"loss": loss, "swarm_over_it": object_of(answers[0])["held_out_loss"]["end"] / loss}


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


def _kernels(answers: Sequence[str]) -> Figures:
    return {what: goal["measured"] for what, goal in object_of(answers[0])["goals"].items()}


TRAINING = (
    Entry(
        name="demo",
        commands=(DEMO,),
        read=_demo,
        measures=("bootstrap.demo.command", "bootstrap.demo.run", "bootstrap.demo.closing", *SWARM),
        minutes=1.5,
        row=Row(
            "the demo: 4 peers, one killed, {million_tokens:.2f} M tokens",
            "{seconds:.0f} s in all; held-out loss {loss_start:.2f} -> {loss_end:.2f} nats a byte, below a byte "
            "bigram's {loss_bigram:.2f}; replicas equal to the last bit",
        ),
    ),
    Entry(
        name="single process",
        commands=(DEMO, Command("python -m benchmarks.single_process --newest-demo")),
        read=_single,
        measures=("benchmarks.single_process", "bootstrap.demo.run", *SWARM),
        minutes=4,
        row=Row(
            "one process on the same tokens",
            "{loss:.2f}: the swarm ends at {swarm_over_it:.2f} of it",
            "`python -m benchmarks.single_process --newest-demo`, after `make demo`",
        ),
    ),
    Entry(
        name="exactness",
        commands=(Command("make test TESTS=tests/peer/round/test_equivalence.py", ""),),
        read=passed,
        measures=("tests.peer.round.test_equivalence",),
        minutes=1,
        row=Row(
            "exact codecs against plain PyTorch, 20 steps of AdamW and SGD",
            "gradients within 1e-5, weights and loss within 1e-4",
        ),
    ),
    Entry(
        name="throughput",
        commands=(Command("python -m benchmarks.training_throughput --pairs 3"),),
        read=_throughput,
        measures=("benchmarks.training_throughput", "benchmarks.single_process", *SWARM),
        minutes=4,
        row=Row(
            "2 peers with default settings against one process of 2 threads, 22.8 M parameters",
            "{ratio:.2f} times its tokens/s (median of {pairs:.0f} pairs, {least:.2f} to {most:.2f}), int8, one step's "
            "delay",
        ),
    ),
    Entry(
        name="stale share",
        commands=(Command("python -m benchmarks.round.stale_share"),),
        read=_stale,
        measures=("benchmarks.round.stale_share",),
        minutes=12,
        row=Row(
            "a quarter of each step stale, NAdamW",
            "{percent_over_synchronous:.1f} % above synchronous NAdamW, below plain AdamW",
        ),
    ),
    Entry(
        name="averaging",
        commands=(Command("python -m benchmarks.round.averaging"),),
        read=_averaging,
        measures=("benchmarks.round.averaging", "benchmarks.round.averaging_ours"),
        minutes=8,
        row=Row(
            "a round of 25 M values among 3 peers, int8, encrypted, replicas equal",
            "{seconds:.3f} s; hivemind's fastest 8-bit codec {hivemind_seconds:.2f} s with "
            "{hivemind_error_over_ours:.1f} times the error, gloo {gloo_seconds:.2f} s in the clear "
            "([table](docs/averaging.md))",
        ),
    ),
    Entry(
        name="codecs",
        commands=(Command("python -m benchmarks.round.codecs_in_training"),),
        read=_codecs,
        measures=("benchmarks.round.codecs_in_training",),
        minutes=25,
        row=Row(
            "held-out loss over fp32's at equal tokens, 3 seeds",
            "averaging int8 {averaging_int8:+.2f} %, int4 {averaging_int4:+.1f} %, topk {averaging_topk:+.1f} %; "
            "activations int8 {activations_int8:+.2f} %, int4 {activations_int4:+.1f} % ([table](docs/codecs.md))",
        ),
    ),
    Entry(
        name="kernels",
        commands=(Command("python -m benchmarks.kernels"),),
        read=_kernels,
        measures=("benchmarks.kernels",),
        minutes=2,
    ),
)
