"""The protocol's page says what the code does: its example in bytes is computed anew, its tables are the code's."""

import re
from typing import get_args

import pytest

from swarm.core.audit.hash_chain import HashChain, check_reveal
from swarm.core.canonical import digest
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Version
from swarm.core.settings import AuditSettings
from swarm.identity.key import Identity
from tests import ROOT
from verification.audit.amplified import TABLE as MOVED
from verification.audit.amplified import MovedBounds, moved_bounds_for
from verification.audit.draws import contribution_rate, draw, hop_draw, microbatch_rate
from verification.audit.evidence import Kind as EvidenceKind
from verification.audit.tolerance import TABLE, Kind, bounds_for
from verification.audit.verdicts import Ban, Debt, JurorVote, Pardon, Plea, Promotion, Quarantine

DOCS = ROOT / "docs"
PAGE = (DOCS / "verification.md").read_text()
SEED = bytes(range(32))


def golden() -> dict[str, str]:
    """What the blocks named golden say, by name."""
    lines = "".join(re.findall(r"```golden\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    return dict(re.fullmatch(r"(\S.*?\S) +(\S+)", line).groups() for line in lines)  # type: ignore[union-attr, misc]


def computed() -> dict[str, str]:
    """What they must say."""
    chain = HashChain(SEED, 4)
    drawn = draw(chain.reveal(2), b"\x11" * 32, auditor=PeerId("a"), target=PeerId("b"))
    hop_drawn = hop_draw(chain.reveal(2), MicrobatchId(10), auditor=PeerId("a"), target=PeerId("b"))
    hop, contribution = microbatch_rate(3), contribution_rate(3)
    ban = Ban("ab" * 32, PeerId("accused"), StageIndex(1), Version(300), "replay_mismatch", SEED)
    return {
        "chain seed": SEED.hex(),
        **{f"value({version})": chain.reveal(version).hex() for version in range(4)},
        "chain end": chain.end.hex(),
        "draw with value(2)": drawn.value.hex(),
        'digest("draw/contribution")': digest("draw/contribution", drawn.value).hex(),
        f"hits contribution at {contribution:g}": "yes" if drawn.hits_contribution(contribution) else "no",
        "draw on microbatch 10": hop_drawn.value.hex(),
        'digest("draw/hop")': digest("draw/hop", hop_drawn.value).hex(),
        f"hits hop at {hop:g}": "yes" if hop_drawn.hits_hop(hop) else "no",
        "ban signed": ban.signed_bytes().hex(),
        "ban digest": ban.digest().hex(),
        "ban signature": ban.signed_by(Identity.from_seed(SEED)).signature.hex(),
    }


def test_the_example_in_bytes_is_the_codes() -> None:
    assert golden() == computed()


def test_the_examples_reveals_lead_to_its_chain_end() -> None:
    told = {
        name: bytes.fromhex(said) for name, said in golden().items() if re.fullmatch(r"value\(\d\)|chain end", name)
    }
    assert len(told) == 5
    for version in range(4):
        check_reveal(told["chain end"], version, told[f"value({version})"], length=4)


def table(heading: str) -> list[list[str]]:
    """Cells of the table whose first line begins so, without that line."""
    found = re.search(rf"^\| {re.escape(heading)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found is not None, f"no table begins with {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def test_the_table_of_bounds_is_the_codes() -> None:
    told = {}
    for computes, named, carries, floor, fraud in table("compute | codec"):
        for codec in named.split(", "):
            for kind in get_args(Kind) if carries == "all" else carries.split(", "):
                number, _, note = fraud.partition(", ")
                told[computes, codec, kind] = (float(floor), float(number), note == "report only")
    other = ("any other", "any other")
    codes = {key: bounds_for(*key) for key in (*TABLE, *((*other, kind) for kind in get_args(Kind)))}
    assert told == {key: (it.floor, it.fraud, it.report_only) for key, it in codes.items()}


def test_the_table_of_what_errors_move_is_the_codes() -> None:
    told = {}
    for pair, fraud, spread, bias in table("compute, averaging codec"):
        computes, codec = ("other", "other") if pair == "any other" else pair.split(", ")
        number, _, note = fraud.partition(", ")
        told[computes, codec] = MovedBounds(float(number), float(spread), float(bias), note == "report only")
    assert told == {key: moved_bounds_for(*key) for key in (*MOVED, ("other", "other"))}


def test_every_kind_of_evidence_and_every_verdict_is_described() -> None:
    assert sorted(row[0].strip("`") for row in table("kind | facts")) == sorted(get_args(EvidenceKind))
    assert sorted(row[0].strip("`") for row in table("kind | checks")) == sorted(get_args(EvidenceKind))
    forms = {row[1].strip("`") for row in table("form | domain")}
    assert forms == {made.DOMAIN for made in (Ban, Quarantine, JurorVote, Pardon, Promotion, Debt, Plea)}


@pytest.mark.parametrize("name", ["hop_budget", "contribution_budget", "reducer_share"])
def test_the_budgets_are_the_manifests(name: str) -> None:
    assert f"`audits.{name}` {getattr(AuditSettings(), name):g}" in PAGE


@pytest.mark.parametrize("page", ["verification.md", "threat_model.md"])
def test_every_file_that_the_pages_name_is_there(page: str) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md))`", (DOCS / page).read_text()))
    assert len(named) >= 5
    assert [path for path in sorted(named) if not (DOCS.parent / path).exists()] == []
