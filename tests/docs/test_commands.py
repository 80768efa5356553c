"""Every command that stands in README and docs is known here by a small form, and runs.

Benchmarks take their options and, some here and others in soaks, run with `--smoke`; commands of owners and hosts run
in one small run of real processes (`test_commands_of_a_run`). What is known by a test runs there.
"""

import re
import runpy
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from benchmarks.homes.namespaces import why_not
from benchmarks.results.entry import object_of
from swarm.cli import VERBS, group
from tests import ROOT
from tests.docs.commands import ALL, COMMANDS, commands_in
from tests.docs.test_commands_of_a_run import OF_A_RUN, made_folder_of_a_run
from tests.process_swarm import Zygote

SMOKE_S = 150.0
COSTLY_SMOKE_S = 900.0
"""Of those of `COSTLY`, which take half a minute to two minutes on two quiet cores."""

NEED_NAMESPACES = (
    "benchmarks.big_stage",
    "benchmarks.homes.bulk",
    "benchmarks.homes.end",
    "benchmarks.homes.links",
    "benchmarks.homes.punching",
    "benchmarks.outer_steps",
    "benchmarks.owner.limits",
)
COSTLY = (
    "benchmarks.big_stage",
    "benchmarks.churn.coordinator_load",
    "benchmarks.churn.kills",
    "benchmarks.fleet.fit",
    "benchmarks.homes.bulk",
    "benchmarks.homes.end",
    "benchmarks.homes.links",
    "benchmarks.homes.punching",
    "benchmarks.kernels",
    "benchmarks.local_steps_loss",
    "benchmarks.muon",
    "benchmarks.outer_steps",
    "benchmarks.owner.leave",
    "benchmarks.owner.limits",
    "benchmarks.owner.memory",
    "benchmarks.red_team",
    "benchmarks.red_team.mutating",
    "benchmarks.round.averaging",
    "benchmarks.tokenizing",
    "benchmarks.training_throughput",
    "benchmarks.verification.attacks",
    "benchmarks.verification.damage_by_liars",
    "benchmarks.verification.honest_audits",
    "benchmarks.verification.time_to_ban",
    "benchmarks.windows.audits",
    "tests.chaos",
)
"""Some seconds of the processor, however small: most start processes, each of which imports torch, or compile."""

BY_A_TEST = {
    ".venv/bin/swarm demo --help": "tests/bootstrap/program/test_demo.py",
    "make demo": "tests/bootstrap/program/test_demo.py::test_short_demo_survives_a_kill_and_reports",
    'make demo DEMO="--peers 6 --steps 100 --kill 2@40"': "tests/bootstrap/program/test_demo.py",
    "make gpu": "tests/peer/sim/test_mixed_devices.py",
    "make results": "tests/benchmarks/results/test_measuring.py",
    "make test": "tests/docs/test_commands.py",
    "python -m peer.adversary KIND@STEP join ...": "tests/peer/adversary/test_adversary.py",
    "python -m tests.docs.manifest_page": "tests/docs/test_manifest_page.py",
    "pip wheel --no-deps -w . .": "tests/swarm/test_wheel.py",
    "pipx install ./homeswarm-0.1.0-py3-none-any.whl": "tests/swarm/test_wheel.py",
    "python -m benchmarks.families --json": "tests/benchmarks/test_families.py",
    "python -m benchmarks.gpu": "tests/benchmarks/test_devices.py",
    "python -m benchmarks.numeric_zoo --json --keep zoo.jsonl --depths 1 4 --microbatches 1": (
        "tests/benchmarks/test_numeric_zoo.py"
    ),
    "python -m benchmarks.windows.numeric_classes --first 102 --keep classes.jsonl": (
        "tests/benchmarks/test_window_classes.py"
    ),
    "python -m benchmarks.verification.device_spread": "tests/benchmarks/test_devices.py",
    "python -m benchmarks.results --stale": "tests/benchmarks/results/test_staleness.py",
    "python -m benchmarks.owner.shared_machine": "tests/benchmarks/test_speed_benchmarks.py",
    "swarm calibrate --audits 10000": "tests/swarm/commands/test_calibrate.py",
    "swarm calibrate --subspace 8": "tests/swarm/commands/test_calibrate.py",
    "swarm demo --attack KIND:1@10": "tests/bootstrap/program/test_demo.py",
    "swarm demo --attack written_result:1@10": "tests/bootstrap/program/test_demo.py",
    "swarm demo --peers 8 --attack sign_flip:1@10": "tests/bootstrap/program/test_demo.py",
    "swarm config gpu auto": "tests/peer/owner/test_gpu_limits.py",
    "swarm identity show --dir FOLDER/gpu-1": "tests/peer/program/test_two_gpus.py",
    "swarm join 'swarm://...' --gpu all": "tests/peer/program/test_two_gpus.py",
    "swarm config router-ports leave": "tests/swarm/core/owner/test_guest.py",
    "swarm families": "tests/swarm/test_cli_commands.py",
    "python -m benchmarks.families.finetuning --json": "tests/benchmarks/test_families.py",
    "swarm evidence verify FILE --base BASE": "tests/swarm/checkpoint/test_adapters.py",
    "swarm export run/checkpoints adapters": "tests/swarm/checkpoint/test_adapters.py",
    "swarm export run/checkpoints model --base MODEL": "tests/swarm/checkpoint/test_adapters.py",
    "swarm init --checkpoint MODEL --lora 16 --qlora run.toml": "tests/swarm/commands/test_init.py",
    "swarm init --checkpoint MODEL --lora 16 run.toml": "tests/swarm/commands/test_init.py",
    'swarm generate model --chat "How do I sort a list?"': "tests/swarm/checkpoint/test_huggingface_export.py",
    "swarm host run.toml --eval-tasks arc_easy,hellaswag": "tests/bootstrap/state/test_task_scores.py",
    "swarm plan run.toml": "tests/swarm/commands/test_plan_command.py",
    "swarm pull 'swarm://...' adapters": "tests/swarm/commands/test_pull.py",
    "swarm pull 'swarm://...' model --base MODEL": "tests/swarm/commands/test_pull.py",
    "swarm evidence fetch PAGE PEER FILE --run-key KEY": "tests/bootstrap/program/test_dashboard.py",
    "swarm evidence verify FILE...": "tests/verification/audit/test_evidence.py",
    "swarm evidence verify FILE --data TOKENS --base BASE --run-key PEER": "tests/verification/audit/test_evidence.py",
    "swarm evidence verify run/evidence/*": "tests/verification/audit/test_evidence.py",
    "swarm identity export FILE": "tests/swarm/identity/test_backup.py",
    "swarm init --checkpoint MODEL run.toml": "tests/swarm/commands/test_init.py",
    "swarm init --stages 1 --checkpoint MODEL run.toml": "tests/swarm/commands/test_init.py",
    "swarm init --stages 1 run.toml": "tests/swarm/commands/test_init.py",
    "swarm demo --stages 1 --local-steps 20": "tests/bootstrap/program/test_demo.py::test_a_run_in_windows_is_one",
    "swarm plan run.toml --fleet 16 --tflops 60 --memory-gib 64 --gpu-memory-gib 24 --session-hours 8": (
        "tests/swarm/commands/test_plan_command.py"
    ),
    "swarm plan run.toml --fleet PEERS": "tests/swarm/commands/test_plan_command.py",
    "swarm rollback FOLDER --to newest": "tests/bootstrap/state/test_coming_back.py",
    "swarm rollback FOLDER --to newest --yes": "tests/bootstrap/state/test_coming_back.py",
}
"""Commands whose small form is a test of their own."""

BENCHMARKS = [command for command in COMMANDS if re.match(r"python -m (benchmarks|tests)\.", command)]
TESTS = [command for command in COMMANDS if re.match(r"make (test|soak) TESTS=|python -m pytest ", command)]
SIMULATIONS = [command for command in COMMANDS if command.startswith("swarm simulate ")]


def small(benchmarks: Sequence[str]) -> list[str]:
    """One of those whose options are the same, and none whose options another has too."""
    by_words = {
        frozenset(shlex.split(command)) - {"--json"}: command for command in benchmarks if command not in BY_A_TEST
    }
    return [command for words, command in by_words.items() if not any(words < others for others in by_words)]


def module_of(command: str) -> str:
    return shlex.split(command)[2]


SMALL = small(BENCHMARKS)
QUICK = [
    command for module, command in {module_of(command): command for command in SMALL}.items() if module not in COSTLY
]
"""Of each benchmark that is not costly, one command."""


def test_commands_are_found_in_blocks_and_in_sentences() -> None:
    page = """
Say

    swarm join 'swarm://x'   # the line
    swarm pause; swarm resume
    swarm top | logs      both
    make test    # all

and `swarm status`, or (`python -m benchmarks.kernels
--threads 2`), `swarm/cli.py`.
"""
    assert list(commands_in(page)) == [
        *("swarm join 'swarm://x'", "swarm pause", "swarm resume", "swarm top", "swarm logs", "make test"),
        *("swarm status", "python -m benchmarks.kernels --threads 2"),
    ]
    assert list(commands_in("`python -m a.b [--loss 0.01]`")) == ["python -m a.b --loss 0.01"]


def test_each_command_has_a_small_form() -> None:
    known = {*BY_A_TEST, *BENCHMARKS, *TESTS, *SIMULATIONS, *OF_A_RUN}
    assert not set(COMMANDS) - known
    assert not {*BY_A_TEST, *OF_A_RUN} - set(ALL), "nobody reads of these any more"
    for test in BY_A_TEST.values():
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")


def test_verbs_that_are_spoken_of_are_there() -> None:
    for command in ALL:
        if command.startswith("swarm "):
            assert command.split()[1] in VERBS, command


@pytest.mark.parametrize("command", TESTS)
def test_tests_that_are_named_are_there_and_of_their_kind(command: str) -> None:
    path = ROOT / command.strip('"').rpartition("tests/")[2].join(("tests/", ""))
    text = path.read_text(encoding="utf-8")
    assert "def test" in text
    assert ("pytest.mark.soak" in text) or not command.startswith("make soak")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("swarm ")])
def test_options_of_the_commands_are_there(command: str) -> None:
    words = [word for word in shlex.split(command)[1:] if word not in ("...", "INVITE", "FOLDER")]
    verb, *options = words
    found = group.get_command(click.Context(group), verb)
    while isinstance(found, click.Group) and options and not options[0].startswith("-"):
        found = found.get_command(click.Context(found), options.pop(0))
        assert found is not None, command
    assert found is not None
    known = {name for one in found.params for name in (*one.opts, *one.secondary_opts)}
    assert {word for word in options if word.startswith("-")} <= known


# -- benchmarks ------------------------------------------------------------------------------------------------


class Understood(BaseException):
    """A command line was taken, and the work would begin."""


def begun(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the benchmark its command line. Raises Understood where its work would begin, SystemExit if it refuses."""

    def begin(*_: object, **__: object) -> None:
        raise Understood

    parse = ArgumentParser.parse_args

    def parse_and_begin(parser: ArgumentParser, *given: Sequence[str] | None) -> None:
        parse(parser, *given)
        begin()

    monkeypatch.setattr(click.Command, "invoke", begin)
    monkeypatch.setattr(ArgumentParser, "parse_args", parse_and_begin)
    _, _, module, *options = shlex.split(command)
    monkeypatch.setattr("sys.argv", [module, *options])
    runpy.run_module(module, run_name="__main__", alter_sys=False)


@pytest.mark.parametrize("command", [one for one in BENCHMARKS if module_of(one) != "tests.docs.manifest_page"])
def test_a_benchmark_takes_the_options_that_are_written(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Understood):
        begun(command, monkeypatch)


@pytest.mark.parametrize("module", ["benchmarks.kernels", "benchmarks.round.exact_threads"])
def test_an_option_that_is_not_there_is_not_taken(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        begun(f"python -m {module} --no-such-option", monkeypatch)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Where commands find what they name, and may write."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs").mkdir()
    return tmp_path


def smoke(zygote: Zygote, folder: Path, command: str, *more: str, timeout_s: float = SMOKE_S) -> str:
    """What the command answers; it must end well."""
    module, *options = shlex.split(command)[2:]
    log, out = folder / "log", folder / "out"
    pid = zygote.start(["-m", module, *options, *more], log, cwd=folder, out=out)
    code = zygote.exit_code(pid, timeout_s=timeout_s)
    assert code == 0, f"{command} ended with {code}: {log.read_text()[-3000:]}"
    return out.read_text()


def check_benchmark(zygote: Zygote, folder: Path, command: str) -> None:
    module = module_of(command)
    reason = why_not() if module in NEED_NAMESPACES else None
    if reason is not None:
        pytest.skip(reason)
    if "--newest-demo" in command:
        made_folder_of_a_run(folder / "demo-out" / "one" / "run")
    more = ["--smoke"] if module.startswith("benchmarks") else ["--minutes", "0.1"]
    as_json = [] if "--json" in command else ["--json"]
    timeout_s = SMOKE_S if command in QUICK else COSTLY_SMOKE_S
    assert object_of(smoke(zygote, folder, command, *more, *as_json, timeout_s=timeout_s))


@pytest.mark.processes
@pytest.mark.timeout(SMOKE_S + 10)
@pytest.mark.parametrize("command", QUICK)
def test_a_benchmark_runs_small(zygote: Zygote, workplace: Path, command: str) -> None:
    check_benchmark(zygote, workplace, command)


@pytest.mark.soak
@pytest.mark.drawn(24)
@pytest.mark.processes
@pytest.mark.parametrize("command", [command for command in SMALL if command not in QUICK])
def test_a_costly_benchmark_runs_small(zygote: Zygote, workplace: Path, command: str) -> None:
    check_benchmark(zygote, workplace, command)


@pytest.mark.processes
@pytest.mark.parametrize("command", small(SIMULATIONS)[-1:])
def test_a_fleet_is_simulated(zygote: Zygote, workplace: Path, command: str) -> None:
    """The smaller of the two that are shown."""
    assert object_of(smoke(zygote, workplace, command.replace("swarm", "python -m swarm"), "--json"))["peers"] == 500
