"""What auditors say of honest work, added up so that one voice is one voice."""

from bootstrap.owner.honest_spread import MAX_PAIRS, spread_by_pair
from swarm.core.audit.honest_audits import MAX_CLASSES, MOST_AUDITS, Agreed, AuditsMade, HonestAudits
from swarm.core.ids import StageIndex
from tests.swarm_in_process import identity_of

GPU, CPU = "torch-2.13.0/cuda-sm90/bf16", "torch-2.13.0/cpu-avx2/bf16"


def word(number: int, *honest: HonestAudits, own: str = CPU) -> AuditsMade:
    return AuditsMade(
        run_id="run",
        auditor=identity_of(number).peer_id,
        stage=StageIndex(0),
        version=3,
        numeric_class=own,
        honest=honest,
    )


def of(numeric_class: str, num_audits: int, share: float) -> HonestAudits:
    return HonestAudits(numeric_class=numeric_class, contribution=Agreed(num_audits, share))


def test_a_figure_says_how_many_stand_behind_it() -> None:
    words = [word(number, of(GPU, 10 + number, share)) for number, share in enumerate((0.1, 0.2, 0.3, 0.4))]
    (pair,) = spread_by_pair(words)
    found = pair.by_kind["contribution"]
    assert (pair.auditor, pair.audited, pair.reporters) == (CPU, GPU, 4)
    assert (found.reporters, found.audits) == (4, 11)
    assert (found.median_share, found.share_of_two, found.largest_share) == (0.2, 0.3, 0.4)
    assert pair.by_kind["gradient"].reporters == 0


def test_one_that_lies_moves_nothing_but_the_farthest_by_anyones_word() -> None:
    honest = [word(number, of(GPU, 10, 0.2)) for number in range(4)]
    (true,) = spread_by_pair(honest)
    for lie in (of(GPU, MOST_AUDITS, 1.0), of(GPU, 1, 0.0)):
        (told,) = spread_by_pair([*honest, word(4, lie)])
        one, other = true.by_kind["contribution"], told.by_kind["contribution"]
        assert (other.median_share, other.share_of_two, other.audits) == (one.median_share, 0.2, 10)
        assert other.largest_share in (0.2, 1.0)


def test_rows_that_one_peer_invents_stand_behind_what_two_bear_out() -> None:
    honest = [word(number, of(GPU, 1, 0.2)) for number in range(2)]
    liars = [
        word(9 + liar, *(of(f"class {number}", MOST_AUDITS, 1.0) for number in range(MAX_CLASSES)), own=str(liar))
        for liar in range(8)
    ]
    pairs = spread_by_pair([*liars, *honest])
    assert len(pairs) == MAX_PAIRS
    assert (pairs[0].audited, pairs[0].reporters) == (GPU, 2)


def test_auditors_add_up_what_they_find() -> None:
    found = HonestAudits(numeric_class=GPU).and_one("activation", 0.3).and_one("activation", 0.1)
    assert found.activation == Agreed(2, 0.3)
    assert found.gradient == Agreed()
