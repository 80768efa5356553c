"""Who audits whom: chains for ever the same, draws that hit at their rate, and independently of one another."""

import hashlib
import math
import random
from dataclasses import replace
from itertools import combinations

import pytest

from swarm.core.audit.hash_chain import LONGEST_CHAIN, HashChain, check_reveal
from swarm.core.audit.recomputed import FEWEST_PARTS
from swarm.core.canonical import digest
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Contribution, Rate, Work
from swarm.core.settings import MOST_STEPS
from tests.swarm.core.audit.chances import NO_CHANCE
from verification.audit.draws import (
    AuditBudget,
    Draw,
    bound_99,
    contribution_rate,
    detection,
    draw,
    expected_time_to_ban,
    found_by_one,
    found_within,
    hop_draw,
    microbatch_rate,
    reducer_rate,
)

SEED = bytes(range(32))
TARGET = PeerId("target")
AUDITORS = tuple(PeerId(f"auditor {number}") for number in range(4))


def _draws(auditor: PeerId, num: int) -> list[Draw]:
    """The auditor's draws on one contribution a version."""
    chain = HashChain(hashlib.sha256(auditor.encode()).digest(), num)
    return [
        draw(chain.reveal(version), hashlib.sha256(b"%d" % version).digest(), auditor=auditor, target=TARGET)
        for version in range(num)
    ]


NUM_DRAWS = 5000


@pytest.fixture(scope="module")
def all_draws() -> dict[PeerId, list[Draw]]:
    return {auditor: _draws(auditor, NUM_DRAWS) for auditor in AUDITORS}


def _assert_binomial(hits: int, trials: int, rate: float) -> None:
    """Within 3.9 standard deviations: an honest draw fails once in 10,000 seeds, and the seeds are fixed."""
    assert abs(hits - trials * rate) <= 3.9 * math.sqrt(trials * rate * (1 - rate)), (hits, trials, rate)


def test_the_chain_never_changes() -> None:
    chain = HashChain(SEED, 10)
    assert chain.end.hex() == "e2eb5b2bcba87c11d58a808630f32bdc9a6f7cc0dcd3d9689ba8807d0ec76ab6"
    assert chain.reveal(0).hex() == "2a7b2f95b4913e8eee4c006bd002e94e004a6357ddf01a085d6ab5a8452ccd06"
    assert chain.reveal(9).hex() == "47f85fe154ab20321a33271503552ee201d8c151455373cb6f6088754af4aad6"
    # The same by the words of docs: value 9 is H(seed), each value is hashed to the one before, value 0 to the end.
    value = hashlib.sha256(b"homeswarm/draw-chain-seed\0\xc4\x20" + SEED).digest()
    for version in reversed(range(10)):
        assert chain.reveal(version) == value
        value = hashlib.sha256(b"homeswarm/draw-chain\0\xc4\x20" + value).digest()
    assert chain.end == value


def test_a_draw_never_changes() -> None:
    made = draw(HashChain(SEED, 10).reveal(3), SEED, auditor=PeerId("a"), target=PeerId("b"))
    assert made.value.hex() == "72650d3aac024e011c4e7ae1e3778b39b846faeeaab0d230af10016486717647"
    assert (made.hits_hop(0.7), made.hits_hop(0.8)) == (False, True)
    assert (made.hits_contribution(0.1), made.hits_contribution(0.2)) == (False, True)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 100])
def test_every_reveal_is_checked_against_the_end_and_against_any_other(length: int) -> None:
    chain = HashChain(SEED, length)
    values = [chain.reveal(version) for version in range(length)]
    assert len(set(values)) == length
    for version, value in enumerate(values):
        check_reveal(chain.end, version, value)
        for other in range(0, length, 7):
            check_reveal(chain.end, version, value, known=(other, values[other]))


@pytest.mark.parametrize("total_steps", [1, 200, 65_535, 70_000])
def test_a_runs_chain_outlasts_it_twice(total_steps: int) -> None:
    chain = HashChain.of_run(SEED, total_steps)
    last = 2 * total_steps
    check_reveal(chain.end, last, chain.reveal(last))


def test_the_longest_run_has_a_chain() -> None:
    assert 2 * MOST_STEPS <= LONGEST_CHAIN


def test_a_long_chain_keeps_few_values() -> None:
    chain = HashChain(SEED, 1 << 16)
    assert len(chain._kept) <= 257
    check_reveal(chain.end, 65_535, chain.reveal(65_535))
    check_reveal(chain.end, 40_000, chain.reveal(40_000), known=(39_998, chain.reveal(39_998)))
    with pytest.raises(LocalError):
        chain.reveal(1 << 16)


def test_before_the_first_version_a_chain_goes_on_from_its_end() -> None:
    chain = HashChain(SEED, 10)
    assert chain.reveal(-1) == chain.end
    assert chain.reveal(-2) == digest("draw-chain", chain.end)
    assert chain.end == digest("draw-chain", chain.reveal(0))


def test_a_wrong_reveal_is_refused() -> None:
    chain, other = HashChain(SEED, 20), HashChain(bytes(32), 20)
    value = chain.reveal(5)
    for version, wrong in (
        (5, other.reveal(5)),
        (5, chain.reveal(4)),
        (5, chain.reveal(6)),
        (4, value),
        (5, value[:-1]),
        (5, b""),
        (5, value[:-1] + bytes([value[-1] ^ 1])),
        (-1, chain.end),
        (20, bytes(32)),
        (1 << 62, value),  # and no hash is computed
    ):
        for known in (None, (2, chain.reveal(2)), (5, value), (9, chain.reveal(9))):
            with pytest.raises(RemoteError) as caught:
                check_reveal(chain.end, version, wrong, known=known, length=20)
            assert caught.value.kind == "draw"


def test_a_known_value_is_enough_without_the_end() -> None:
    chain = HashChain(SEED, 20)
    check_reveal(bytes(32), 7, chain.reveal(7), known=(3, chain.reveal(3)))
    with pytest.raises(RemoteError):
        check_reveal(chain.end, 7, chain.reveal(7), known=(3, bytes(32)))


@pytest.mark.parametrize("rate", [0.01, 0.08, 0.5, 0.93])
def test_draws_hit_at_their_rate(all_draws: dict[PeerId, list[Draw]], rate: float) -> None:
    for draws in all_draws.values():
        _assert_binomial(sum(made.hits_hop(rate) for made in draws), NUM_DRAWS, rate)
        _assert_binomial(sum(made.hits_contribution(rate) for made in draws), NUM_DRAWS, rate)
        _assert_binomial(sum(made.hits_part(3, rate) for made in draws), NUM_DRAWS, rate)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_hits_are_independent_between_auditors_kinds_and_versions(
    all_draws: dict[PeerId, list[Draw]], rate: float
) -> None:
    hop = {auditor: [made.hits_hop(rate) for made in draws] for auditor, draws in all_draws.items()}
    for one, other in combinations(AUDITORS, 2):
        both = sum(a and b for a, b in zip(hop[one], hop[other], strict=True))
        _assert_binomial(both, NUM_DRAWS, rate**2)
    for auditor, draws in all_draws.items():
        _assert_binomial(
            sum(made.hits_hop(rate) and made.hits_contribution(rate) for made in draws), NUM_DRAWS, rate**2
        )
        _assert_binomial(sum(made.hits_part(0, rate) and made.hits_part(1, rate) for made in draws), NUM_DRAWS, rate**2)
        pairs = [hop[auditor][number : number + 2] for number in range(0, NUM_DRAWS, 2)]
        _assert_binomial(sum(all(pair) for pair in pairs), len(pairs), rate**2)


def test_a_rate_of_one_always_hits_and_of_zero_never(all_draws: dict[PeerId, list[Draw]]) -> None:
    draws = all_draws[AUDITORS[0]]
    assert all(made.hits_hop(1.0) and made.hits_contribution(1.0) for made in draws)
    assert not any(made.hits_hop(0.0) or made.hits_contribution(0.0) for made in draws)


def test_whoever_copies_an_end_draws_otherwise() -> None:
    one, other = (draw(SEED, bytes(32), auditor=auditor, target=TARGET) for auditor in AUDITORS[:2])
    assert one.value != other.value
    assert draw(SEED, bytes(32), auditor=AUDITORS[0], target=PeerId("another")).value != one.value
    assert draw(SEED, SEED, auditor=AUDITORS[0], target=TARGET).value != one.value


def test_rates_spend_the_budget_whatever_the_number_of_replicas() -> None:
    for replicas in range(4, 33):
        assert (replicas - 1) * microbatch_rate(replicas) == pytest.approx(0.08)
        assert (replicas - 1) * contribution_rate(replicas) == pytest.approx(0.07)
    assert microbatch_rate(9) == pytest.approx(0.01)
    assert microbatch_rate(2, AuditBudget(hop=2.0)) == 1.0
    assert microbatch_rate(9, factor=5.0) == pytest.approx(0.05)
    assert contribution_rate(8, factor=5.0) == pytest.approx(0.05)
    assert reducer_rate(6, num_parts=FEWEST_PARTS) == reducer_rate(6, num_parts=954) == pytest.approx(0.01)
    assert contribution_rate(8, AuditBudget(contribution=0.7)) == pytest.approx(0.1)
    for replicas in (0, 1):
        assert microbatch_rate(replicas) == contribution_rate(replicas) == 0.0


def test_a_step_has_as_many_audits_of_reduced_parts_however_few_the_parts() -> None:
    """A stage of one part whose reducers take turns: who lies in each is out at the first, not after 100 versions."""
    for replicas in (5, 8, 64):
        assert reducer_rate(replicas, num_parts=1) == pytest.approx(min(1.0, 4 / (replicas - 1)))
        assert detection(reducer_rate(replicas, num_parts=1), replicas - 1) > 0.98
        for parts in range(8, FEWEST_PARTS + 1):
            audits = parts * (replicas - 1) * reducer_rate(replicas, num_parts=parts)
            assert audits == pytest.approx(4.0), "in all, of one version's parts"
    assert reducer_rate(8, AuditBudget(reducer=0.0), num_parts=1) == 0.0


@pytest.mark.parametrize("name", ["hop", "contribution", "reducer"])
@pytest.mark.parametrize("value", [-0.01, math.nan, math.inf])
def test_a_budget_that_is_no_budget_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        AuditBudget(**{name: value})


def test_the_law_of_time_to_ban_holds_in_numbers() -> None:
    assert detection(0.1, 6) == pytest.approx(1 - 0.9**6)
    assert expected_time_to_ban(0.1, 6) == pytest.approx(2.134, abs=1e-3)
    assert bound_99(0.1, 6) == 8
    assert bound_99(0.01, 6) == 77
    assert bound_99(0.9, 1) == 2
    assert bound_99(1.0, 3) == expected_time_to_ban(1.0, 3) == 1
    for rate, auditors in ((0.0, 6), (0.5, 0)):
        assert expected_time_to_ban(rate, auditors) == bound_99(rate, auditors) == math.inf


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("auditors", [1, 3, 6])
def test_the_99_percent_bound_is_the_least_that_holds(rate: float, auditors: int) -> None:
    missed, bound = (1 - rate) ** auditors, int(bound_99(rate, auditors))
    assert missed**bound <= 0.01 < missed ** (bound - 1)


def test_draws_find_a_liar_by_the_geometric_law(all_draws: dict[PeerId, list[Draw]]) -> None:
    """4 auditors at 5 %: each run of versions up to a hit is one sample of the time to ban."""
    rate, times, waited = 0.05, [], 0
    for version in range(NUM_DRAWS):
        waited += 1
        if any(all_draws[auditor][version].hits_hop(rate) for auditor in AUDITORS):
            times.append(waited)
            waited = 0
    mean, found = expected_time_to_ban(rate, len(AUDITORS)), detection(rate, len(AUDITORS))
    deviation = math.sqrt(1 - found) / found
    assert abs(sum(times) / len(times) - mean) <= 3.9 * deviation / math.sqrt(len(times))
    late = sum(time > bound_99(rate, len(AUDITORS)) for time in times)
    assert late <= 0.01 * len(times) + 3.9 * math.sqrt(0.01 * len(times))


def test_one_auditor_finds_a_lie_by_either_of_its_audits_where_it_shows() -> None:
    assert found_by_one(0.2, 0.1, 1) == pytest.approx(1 - 0.8 * 0.9)
    assert found_by_one(0.2, 0.1, 3) == pytest.approx(1 - 0.8**3 * 0.9)
    assert found_by_one(0.2, 0.1, 3, in_hops=0.0) == pytest.approx(0.1)
    assert found_by_one(0.2, 0.1, 3, in_hops=0.5, in_contributions=0.0) == pytest.approx(1 - 0.9**3)
    assert found_by_one(0.2, 0.1, 0) == pytest.approx(0.1)
    assert found_by_one(0.2, 0.1, 3, in_hops=0.0, in_contributions=0.0) == 0.0


def test_each_microbatch_is_drawn_by_itself_at_its_rate() -> None:
    chain, rate = HashChain(SEED, 1000), 0.3
    both = [
        [hop_draw(chain.reveal(v), MicrobatchId(number), auditor=AUDITORS[0], target=TARGET) for number in (7, 8)]
        for v in range(1000)
    ]
    hits = [[drawn.hits_hop(rate) for drawn in pair] for pair in both]
    for number in range(2):
        _assert_binomial(sum(pair[number] for pair in hits), len(hits), rate)
    _assert_binomial(sum(all(pair) for pair in hits), len(hits), rate**2)


def test_ninety_nine_percent_are_found_within_the_bound_and_not_a_version_earlier() -> None:
    for rate, auditors in ((0.01, 7), (0.05, 3), (0.3, 2)):
        bound = int(bound_99(rate, auditors))
        assert found_within(rate, auditors, bound - 1) < 0.99 <= found_within(rate, auditors, bound)
        assert found_within(rate, auditors, 1) == pytest.approx(detection(rate, auditors))


def test_the_digest_of_a_contribution_changes_with_every_field_but_the_signature() -> None:
    work = Work(MicrobatchId(1), 0, Version(2), 8, bytes(32), bytes(32))
    made = Contribution("run", StageIndex(1), Step(3), bytes(32), TARGET, (work,), (bytes(32),), NO_CHANCE)
    rng = random.Random(1)
    others = [
        replace(made, run_id="other"),
        replace(made, stage=StageIndex(2)),
        replace(made, step=Step(4)),
        replace(made, previous_name=rng.randbytes(32)),
        replace(made, peer_id=PeerId("another")),
        replace(made, work=(replace(work, attempt=1),)),
        replace(made, part_digests=(rng.randbytes(32),)),
        replace(made, chance=replace(NO_CHANCE, value=rng.randbytes(32))),
        replace(made, rates=(Rate(PeerId("another"), 3),)),
    ]
    assert len({made.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    assert replace(made, signature=rng.randbytes(64)).digest() == made.digest()
    assert made.digest() == hashlib.sha256(made.signed_bytes()).digest()
