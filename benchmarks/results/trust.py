"""Figures of lies: how soon liars are banned, what they do until then, and what finding them costs."""

from collections.abc import Sequence

from benchmarks.results.entry import SWARM, Command, Entry, Figures, Row, must, object_of

UNLIKE_LIES = ("withholding", "in_tolerance_noise", "bit_flips")
KEEPING = "--keep pieces.jsonl --json"
SIMULATED = ("peer.sim", "peer.sim.swarm")


def _attack(answers: Sequence[str]) -> Figures:
    report = object_of(answers[0])
    must(len(report["bans"]) == 1, "one peer is banned")
    must(sum(peer["killed_at"] is not None for peer in report["peers"]) == 1, "one peer is killed")
    return {"banned_at": report["bans"][0]["step"], "loss": report["held_out_loss"]["end"]}


def _bans(answers: Sequence[str]) -> Figures:
    every = object_of(answers[0])["cases"]
    drawn = [case for case in every if case["observed"]]
    runs = sum(len(case["observed"]) for case in drawn)
    beyond = sum(versions > case["bound_99"] for case in drawn for versions in case["observed"])
    cases = [case for case in every if case["factor"] == 1.0]
    lies = [case for case in cases if case["attack"] not in UNLIKE_LIES]
    others = {case["attack"]: case for case in cases if case["attack"] in UNLIKE_LIES}
    must(all(None not in case["simulated"] for case in lies), "all liars are banned")
    must(not any(case["others_banned"] for case in cases), "no honest peer is banned")
    must(None not in others["withholding"]["quarantined"], "withholding ends in quarantine")
    must(set(others["in_tolerance_noise"]["simulated"]) == {None}, "noise within the tolerance is not found")
    must(set(others["bit_flips"]["simulated"]) == {None}, "a faulty memory's bits are not found")
    over = [versions - case["bound_99"] for case in lies for versions in case["simulated"]]
    return {
        **{"drawn_attacks": len({case["attack"] for case in drawn}), "drawn": runs},
        **{"drawn_past": beyond, "drawn_expected": runs / 100},
        **{"attacks": len(lies), "banned": len(over)},
        **{"past": sum(by > 0 for by in over), "past_by": max(0.0, *over)},
    }


def _liars(answers: Sequence[str]) -> Figures:
    cases = object_of(answers[0])["cases"]
    must(all(set(case["banned"]) == {case["number"]} for case in cases), "all liars are banned")
    must(not any(case["others_banned"] or case["runs_without_100_after"] for case in cases), "only liars are banned")
    return {
        "largest": max(case["largest_after_over_before"][1] for case in cases),
        "within_percent": 100 * (max(case["over_calm_100_after"][1] for case in cases) - 1),
    }


def _honest(answers: Sequence[str]) -> Figures:
    found = object_of(answers[0])
    everything = found["all"]
    must(everything["accused"] == 0, "nobody is accused")
    must(everything["equal_to_the_bit"], "losses and weights equal those of unaudited runs")
    return {
        "audits": everything["audits"],
        "largest_share": everything["largest_honest_share"],
    }


def _cost(answers: Sequence[str]) -> Figures:
    found = object_of(answers[0])
    shares = [100 * one["share_of_compute"] for one in found["audits"]]
    return {"least_percent": min(shares), "most_percent": max(shares), "papers_percent": 100 * found["papers_share"]}


TRUST = (
    Entry(
        name="a liar in a demo",
        commands=(
            Command("swarm demo --peers 8 --attack sign_flip:1@10", "--report answer.json"),
            Command("swarm evidence verify demo-out/*/run/evidence/*", ""),
        ),
        read=_attack,
        measures=("bootstrap.demo.command", "bootstrap.demo.run", "peer.adversary", *SWARM),
        minutes=3,
        rows=(
            Row(
                "8 peers, one of which flips the sign of its gradients from step 10 on",
                "banned at step {banned_at:.0f} by the host's own replay; the evidence file holds without a network; "
                "held-out loss {loss:.2f}, one peer killed besides",
                "`swarm demo --peers 8 --attack sign_flip:1@10`",
            ),
        ),
    ),
    Entry(
        name="time to ban",
        commands=(
            Command("python -m benchmarks.verification.time_to_ban --kit --seeds 20 --simulated-seeds 1", KEEPING),
        ),
        read=_bans,
        measures=("benchmarks.verification.time_to_ban", *SIMULATED),
        minutes=15,
        rows=(
            Row(
                "time to ban, {drawn_attacks:.0f} attacks at 3 audit rates, {drawn:.0f} drawn runs",
                "{drawn_past:.0f} past the law's 99 % bound, {drawn_expected:.0f} expected "
                "([200 seeds](docs/verification_results.md))",
            ),
            Row(
                "{attacks:.0f} attacks on tensors, 1 seed each, simulated whole",
                "all {banned:.0f} liars banned, {past:.0f} of them past the law's 99 % bound, by {past_by:.0f} at "
                "most, no honest peer banned. Three more kinds that are no such lies: withholding ends in quarantine, "
                "noise within the tolerance and a faulty memory's bits are not found "
                "([5 seeds](docs/verification_results.md))",
                "the same command",
            ),
        ),
    ),
    Entry(
        name="damage by liars",
        commands=(
            Command(
                "python -m benchmarks.verification.damage_by_liars --seeds 1 --case 'alie 3 of 8' "
                "--case 'sign_flip 3 of 8' --case 'activation_noise 4 of 8'",
                KEEPING,
            ),
        ),
        read=_liars,
        measures=("benchmarks.verification.damage_by_liars", *SIMULATED),
        minutes=5,
        rows=(
            Row(
                "3 of 8 peers of a stage lie about gradients, 2 attacks; 4 of 8 about hops; 1 seed",
                "all banned; never above {largest:.2f} times the loss before the attack, and 100 versions later within "
                "{within_percent:.1f} % of the run without liars ([19 attacks, 7 of 16, 5 seeds]"
                "(docs/verification_results.md))",
            ),
        ),
    ),
    Entry(
        name="honest audits",
        commands=(
            Command(
                "python -m benchmarks.verification.honest_audits --wire int8 --scene language --audited-steps 6",
                KEEPING,
            ),
        ),
        read=_honest,
        measures=("benchmarks.verification.honest_audits", *SIMULATED),
        minutes=5,
        rows=(
            Row(
                "{audits:.0f} audits among 16 honest peers on machines that differ and are killed and started again, "
                "int8",
                "nobody accused, largest error {largest_share:.2f} of the fraud bound; losses and weights equal those "
                "of the unaudited run to the bit ([12,398 audits, 2 wires, 4 scenes](docs/verification_results.md))",
            ),
        ),
    ),
    Entry(
        name="cost of audits",
        commands=(Command("python -m benchmarks.verification.verification_cost --pairs 0"),),
        read=_cost,
        measures=("benchmarks.verification.verification_cost",),
        minutes=1,
        rows=(
            Row(
                "audits, of a replica's own computing",
                "{least_percent:.0f} to {most_percent:.0f} % at 4, 8 and 32 replicas, 1 or 4 microbatches each",
            ),
        ),
    ),
)
