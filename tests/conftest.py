"""How the tests are dealt out to workers, and fixtures that several test files share."""

import gc
import os
import random
import secrets
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from peer.machine.priority import session_giving_way
from tests import ROOT
from tests.swarm.local.warm_python import WarmPython

if TYPE_CHECKING:  # whoever deals out the tests runs none, and need not load what they do
    from types import FrameType

    from xdist.workermanage import WorkerController

    from tests.process_swarm import Zygote

DRAW_SEED = "draw_seed"
PROCESSES = "processes"
WARM = pytest.StashKey[WarmPython]()
NICE = 10
"""Of workers whose tests start no processes: those of others are held to deadlines, and most give way themselves."""
SESSION_NICE = 5
"""Of all workers together, where sessions share the cores. Daemons that a test starts have a session each, at niceness
12: four of them and two workers that compute share the cores by halves. Were this 0, the four would have a fifth, and
a demo of three minutes would take a quarter of an hour."""
ENDED_AGAIN_S = 60.0

# Of properties the same examples are tried each time, however long each waits for the processor. Others are drawn with
# `--hypothesis-profile default`.
hypothesis_settings.register_profile(
    "ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("ours")


LOOKS_FOR_RINGS = 50_000, 20, 50
"""Python's garbage collector looks after so many objects more. What libraries and trees of sources hold makes each look
long: an eighth of all tests' time was spent on it, and more than half of the architecture's."""


class ProcessesOneAtATime(LoadScopeScheduling):
    """Each file to the worker that is free, but all that have tests of processes, whose deadlines matter, to one.

    By their text: workers tell no marks, and what xdist writes behind a test's name is not heard since pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return PROCESSES if _has_processes(ROOT / file) else file


@cache
def _has_processes(file: Path) -> bool:
    return f"mark.{PROCESSES}" in file.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests of processes wait longer than they compute. Long modes compute."""
    return (os.cpu_count() or 1) + (config.option.markexpr != "soak")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling | None:
    return ProcessesOneAtATime(config, log) if config.option.dist == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    drawing = parser.getgroup("drawing", "of tests marked drawn(N), N cases are run")
    drawing.addoption("--draw-seed", type=int, help="Draw what was drawn with this seed, which is told at the end.")
    drawing.addoption("--all-cases", action="store_true", help="Run all of them.")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Workers draw what is drawn here. They are forks of one process."""
    gc.set_threshold(*LOOKS_FOR_RINGS)
    if config.option.draw_seed is None:
        given = getattr(config, "workerinput", {})
        config.option.draw_seed = given.get(DRAW_SEED, secrets.randbelow(10**6))
    if config.option.dist != "no" and sys.platform == "linux":
        giving_way = ExitStack()
        giving_way.enter_context(session_giving_way(SESSION_NICE))
        config.add_cleanup(giving_way.close)
        config.stash[WARM] = WarmPython()
        config.option.tx = [f"popen//python={config.stash[WARM].command}"] * len(config.option.tx)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: "WorkerController") -> None:
    node.workerinput[DRAW_SEED] = node.config.option.draw_seed


def pytest_unconfigure(config: pytest.Config) -> None:
    if WARM in config.stash:
        config.stash[WARM].close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.all_cases and config.option.markexpr == "soak":
        terminalreporter.write_line(
            f"of tests with many cases some are drawn: --draw-seed {config.option.draw_seed} draws the same, "
            "--all-cases runs all"
        )


def drawn(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Those that are not run: of each test marked `drawn(N)` all cases but N."""
    cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None:
            cases[item.nodeid.partition("[")[0], *mark.args].append(item)
    left = set[pytest.Item]()
    for (name, num), each in cases.items():
        kept = random.Random(f"{seed}/{name}").sample(range(len(each)), min(num, len(each)))
        left |= {item for index, item in enumerate(each) if index not in kept}
    return left


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases are drawn, unless one is named."""
    if not config.option.all_cases and not any("::" in argument for argument in config.args):
        left = drawn(items, config.option.draw_seed)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Models here are so small that a second thread of torch's costs more than it computes, and under load each of its
    turns is waited for. Of a checkout that no test ran in yet, each worker prepares a share of the files, and finds the
    others' done."""
    config = session.config
    if config.option.dist == "no":  # as workers have it
        import torch

        torch.set_num_threads(1)
        # Autograd counts the devices there are once, before it first goes backward, as some files do when imported.
        import_module("tests.pretend_device")
    if "PYTEST_XDIST_WORKER" in os.environ and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        number, workers = (int(os.environ[f"PYTEST_XDIST_WORKER{of}"].removeprefix("gw")) for of in ("", "_COUNT"))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::workers]:
            with suppress(Exception):  # it is said when the file is collected
                import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """What libraries and test files have loaded is not looked through again for rings."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker(PROCESSES) is None:
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


class TimedOut(SystemExit):
    """A test has taken too long. What is raised in a signal's handler event loops let through if it ends a program:
    uvloop logs all else, a task keeps it, and the test would go on."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> Generator[None, bool, bool]:
    """And once more after a while: where it hits a loop's own books, what is closed then may wait for ever."""
    is_set = yield
    fail, (left_s, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    if callable(fail) and left_s:

        def end(number: int, frame: "FrameType | None") -> None:
            try:
                fail(number, frame)
            except pytest.fail.Exception as failed:
                raise TimedOut(failed.msg) from None

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, left_s, ENDED_AGAIN_S)
    return is_set


@pytest.fixture(scope="session")
def zygote() -> "Iterator[Zygote]":
    """One process from which all tests of a session start real `swarm` processes."""
    from peer.sim import TinyRun
    from swarm.local.rehearsal import rehearse
    from tests.process_swarm import Zygote

    rehearse(TinyRun().settings())  # kernels are compiled here once, not by all processes at the same time
    made = Zygote()
    yield made
    made.close()
