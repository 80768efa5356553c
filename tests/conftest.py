"""How the tests are dealt out to workers, and fixtures that several test files share."""

import os
from collections.abc import Iterator

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from peer.sim import TinyRun
from swarm.local.rehearsal import rehearse
from tests.process_swarm import Zygote

PROCESSES = "@processes"
NICE = 10
"""Of workers whose tests start no processes: those of others are held to deadlines, and most give way themselves."""


class ProcessesOneAtATime(LoadScopeScheduling):
    """Each file to the worker that is free, but all tests of processes, whose deadlines matter, to one."""

    def _split_scope(self, nodeid: str) -> str:
        return PROCESSES if nodeid.endswith(PROCESSES) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests of processes wait longer than they compute."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling | None:
    return ProcessesOneAtATime(config, log) if config.option.dist == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """xdist writes a test's group behind its name, where the scheduler reads it."""
    for item in items:
        if item.get_closest_marker("processes") is not None:
            item.add_marker(pytest.mark.xdist_group(PROCESSES.removeprefix("@")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker("processes") is None:
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process from which all tests of a session start real `swarm` processes."""
    rehearse(TinyRun().settings())  # kernels are compiled here once, not by all processes at the same time
    made = Zygote()
    yield made
    made.close()
