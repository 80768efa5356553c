"""Fixtures that several test files share."""

from collections.abc import Iterator

import pytest

from tests.process_swarm import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process from which all tests of a session start real `swarm` processes."""
    made = Zygote()
    yield made
    made.close()
