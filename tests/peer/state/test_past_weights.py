"""Weights that audits need are kept until they are made, and no longer."""

import numpy as np
import pytest

from peer.state.past_weights import PastVersion, PastWeights
from swarm.core.errors import LocalError


def version(number: int) -> PastVersion:
    return PastVersion(np.full(3, number, dtype=np.float32), None, ahead_is_known=True)


def walked(past: PastWeights, first: int, last: int) -> PastWeights:
    for number in range(first, last + 1):
        past.remember(number, version(number))
    return past


def test_only_the_last_versions_are_kept_when_nothing_is_wanted() -> None:
    past = walked(PastWeights(2), 0, 6)
    assert past.versions == [5, 6]
    assert past.get(6).weights.tolist() == [6, 6, 6]
    with pytest.raises(LocalError, match="version 4"):
        past.get(4)


def test_a_wanted_version_stays_until_it_is_not_wanted_any_more() -> None:
    past = walked(PastWeights(1), 0, 3)
    past.want({3}, by="audits")
    walked(past, 4, 6)
    assert past.versions == [3, 6]
    past.want({6}, by="audits")
    assert past.versions == [6]


def test_a_version_that_is_gone_does_not_come_back_when_wanted() -> None:
    past = walked(PastWeights(1), 0, 3)
    past.want({1, 3}, by="audits")
    assert past.versions == [3]


def test_nothing_is_kept_where_nothing_is_replayed_or_after_another_state() -> None:
    assert walked(PastWeights(0), 0, 3).versions == []
    past = walked(PastWeights(2), 0, 3)
    past.want({2, 3}, by="audits")
    past.clear()
    assert past.versions == []
