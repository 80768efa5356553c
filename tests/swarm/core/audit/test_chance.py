"""What a contribution reveals: on its maker's chain and the host's, or refused at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swarm.core.audit.chance import Chance, HostWord, Link, OffChainError
from swarm.core.audit.hash_chain import HashChain
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.settings import MOST_STEPS
from swarm.identity.key import Identity, verify
from tests.swarm.core.audit.chances import HOST_CHAIN, UNSAID, chain_of, chance_of, link_of, said_by, ticket_of
from tests.swarm.core.round.round_world import cached_verify, contribution, facts_of

RUN_KEY, MEMBER = Identity.from_seed(b"k" * 32), PeerId("member")
FACTS: dict[str, Any] = {"maker": MEMBER, "run_id": "run", "stage": StageIndex(1)}


def _check(chance: Chance, step: int, *, link: Link | None = None, said: HostWord | None = None) -> None:
    known = said if said is not None else said_by(HOST_CHAIN, max(0, step - 1))
    chance.check(**FACTS, step=Step(step), link=link, said=known, run_key=RUN_KEY.peer_id, amendments=0, verify=verify)


def _first(step: int) -> Chance:
    return chance_of(MEMBER, step, ticket=ticket_of(MEMBER, RUN_KEY, run_id="run", stage=1))


@pytest.mark.parametrize("step", [0, 1, 2, 3, 900])
def test_a_member_begins_with_its_ticket_at_any_step(step: int) -> None:
    _check(_first(step), step)


@pytest.mark.parametrize("gap", [1, 2, 40])
def test_what_is_certified_of_its_chain_takes_the_place_of_its_ticket(gap: int) -> None:
    _check(chance_of(MEMBER, 50), 50, link=link_of(MEMBER, 50 - gap))


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (lambda chance: replace(chance, value=bytes(32)), "draw"),
        (lambda chance: replace(chance, value=chain_of(MEMBER).reveal(49)), "draw"),
        (lambda chance: replace(chance, value=chain_of(MEMBER).reveal(47)), "draw"),
        (lambda chance: replace(chance, value=chain_of("its other chain").reveal(48)), "draw"),
        (lambda chance: replace(chance, said=HostWord(50, bytes(32))), "draw"),
        (lambda chance: replace(chance, said=said_by(HOST_CHAIN, 48)), "draw"),
        (lambda chance: replace(chance, said=said_by(HOST_CHAIN, 51)), "draw"),
        (lambda chance: replace(chance, said=replace(chance.said, num_versions=49)), "draw"),
        (lambda chance: replace(chance, said=UNSAID), "draw"),
        (lambda chance: replace(chance, ticket=_first(50).ticket), "ticket"),
    ],
)
def test_another_value_is_refused(changed: Callable[[Chance], Chance], kind: str) -> None:
    good = chance_of(MEMBER, 50)
    _check(good, 50, link=link_of(MEMBER, 49))
    with pytest.raises(RemoteError) as caught:
        _check(changed(good), 50, link=link_of(MEMBER, 49))
    assert (caught.value.kind, caught.value.peer_id) == (kind, MEMBER)
    assert isinstance(caught.value, OffChainError) is (changed(good).value != good.value)


@pytest.mark.parametrize(
    "ticket",
    [
        None,
        ticket_of(PeerId("another"), RUN_KEY, run_id="run", stage=1),
        ticket_of(MEMBER, RUN_KEY, run_id="run", stage=0),
        ticket_of(MEMBER, RUN_KEY, run_id="another", stage=1),
        ticket_of(MEMBER, Identity.from_seed(b"m" * 32), run_id="run", stage=1),
    ],
)
def test_whose_chain_is_not_known_cannot_bring_one_of_its_own(ticket: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        _check(replace(_first(50), ticket=ticket), 50)
    assert caught.value.kind == "ticket"


def test_a_member_that_comes_again_with_another_chain_is_refused() -> None:
    """The run key signs one chain an identity; what is certified of that binds."""
    other = Chance(chain_of("its other chain").reveal(48), said_by(HOST_CHAIN, 50), None)
    with pytest.raises(RemoteError, match="not on its hash chain"):
        _check(other, 50, link=link_of(MEMBER, 49))


def test_the_host_s_word_tells_all_that_came_before_it() -> None:
    last = said_by(HOST_CHAIN, 60)
    assert all(last.at_most(num) == said_by(HOST_CHAIN, num) for num in (0, 1, 30, 60))
    assert last.at_most(99) == last
    assert all(last.value_of(version) == HOST_CHAIN.reveal(version) for version in (-1, 0, 59))
    assert last.follows(said_by(HOST_CHAIN, 0))
    assert not said_by(HOST_CHAIN, 0).follows(last)


def test_a_contribution_without_its_maker_s_value_belongs_to_no_round() -> None:
    facts = facts_of(3)
    made = contribution(facts.members[0])
    facts.check_contribution(made, cached_verify)
    for links in ({}, {**facts.links, made.peer_id: link_of(facts.members[1], int(facts.step) - 1)}):
        with pytest.raises(RemoteError) as caught:
            replace(facts, links=links).check_contribution(made, cached_verify)
        assert caught.value.kind in ("ticket", "draw")


def test_a_chain_lasts_for_the_longest_run() -> None:
    length = 1 << 6
    chain = HashChain(bytes(32), length)
    assert HostWord(length, chain.reveal(length - 1)).follows(HostWord(0, chain.end))
    assert HostWord.from_value(HostWord(2 * MOST_STEPS, bytes(32)).to_value()).num_versions == 2 * MOST_STEPS
    with pytest.raises(RemoteError):
        HostWord.from_value([2 * MOST_STEPS + 1, bytes(32)])
