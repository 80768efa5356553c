"""Imports without the garbage collector."""

import gc

import pytest

from swarm.local.importing import importing


def test_nothing_is_collected_meanwhile_and_the_collector_goes_on_as_it_was() -> None:
    assert gc.isenabled()
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled(), "as it was outside"
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
