"""`swarm demo`: what is refused before anything starts, what is shown, and whole demos of real processes."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.live import Live

from bootstrap.demo.alone import held_out_alone
from bootstrap.demo.observed import Observed
from bootstrap.demo.outcome import STAYING, honest_out, of_attacker
from bootstrap.demo.plot import smoothed, write_loss_plot
from bootstrap.demo.report import demo_report, held_out_bigram_loss
from bootstrap.demo.request import (
    BATCH_TOKENS,
    MICROBATCH_SIZE,
    SEQUENCE_LENGTH,
    DemoRequest,
    Kill,
    check,
    manifest_text,
    parse_attackers,
    parse_kill,
    prepare,
)
from bootstrap.demo.run import Demo, Ending
from bootstrap.demo.view import LiveView, PlainView, progress_text, shown_path
from swarm.attacks import Attack
from swarm.cli import ExitCode, run
from swarm.data.bigram import bigram_loss
from swarm.manifest.file import assumed_data, freeze, parse_manifest

SWARM = [str(Path(sys.executable).parent / "swarm")]
MICROBATCHES = BATCH_TOKENS // (MICROBATCH_SIZE * SEQUENCE_LENGTH)
"""Of a step."""
NUMBERS = "".join(f"{number} and {number * number}\n" for number in range(20_000))


def _request(**changes: Any) -> DemoRequest:
    kept = {"stages": 2, "peers": 4, "steps": 20, "kill": Kill(peers=1, step=8), "out": Path("out")}
    return DemoRequest(**{**kept, **changes})


# -- what is asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--text", "gone.txt"], ["--text gone.txt", "correct the path"]),
        (["--text", "short.txt"], ["short.txt", "too short", "add text"]),
        (["--text", "short.txt", "gone.txt"], ["--text gone.txt"]),
        (["--text", "short.txt", "--out", "new/below"], ["short.txt"]),
        (["gone.txt"], ["gone.txt", "--text gone.txt"]),
        (["--out", "full"], ["--out full", "not an empty folder", "give a new one"]),
        (["--out", "short.txt"], ["--out short.txt", "not an empty folder"]),
        (["--out", "short.txt/below"], ["--out short.txt/below", "no folder"]),
        (["--report", "nowhere/report.json"], ["--report nowhere/report.json", "create it"]),
        (["--report", "full"], ["--report full", "is a folder"]),
        (["--stages", "5"], ["--stages 5", "4 layers", "at most 4"]),
        (["--stages", "4", "--peers", "3"], ["--peers 3", "4 stages", "--peers 4"]),
        (["--kill", "3@10"], ["--kill 3@10", "must keep a peer", "at most 2@10"]),
        (["--kill", "1@240"], ["--kill 1@240", "240 steps", "1 to 239"]),
        (["--kill", "one"], ["--kill one", "N@STEP"]),
        (["--peers", "2", "--kill", "1@5"], ["--kill 1@5", "add peers"]),
        (["--attack", "sign_flip"], ["--attack sign_flip", "KIND:COUNT@STEP"]),
        (["--attack", "sign_flop:1@10"], ["--attack sign_flop", "choose sign_flip, sign_flip_1000"]),
        (["--attack", "zeros:1@240"], ["--attack zeros:1@240", "240 steps", "0 to 239"]),
        (["--attack", "zeros:2@5"], ["--attack zeros:2@5", "no peer for 1 of them", "add --peers"]),
        (["--peers", "2", "--attack", "zeros:1@5"], ["no peer for 1 of them", "honest peer"]),
        (["--kill", "0@0", "--attack", "activation_zeros:2@5"], ["no peer for 1 of them", "some stages only"]),
        (["--peers", "0"], ["0 is not in the range"]),
        (["--steps", "many"], ["many is not a valid integer"]),
    ],
)
def test_bad_input_is_one_message_and_nothing_happens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "short.txt").write_text("too little to learn from")
    before = sorted(tmp_path.rglob("*"))
    assert run(["demo", *arguments]) is ExitCode.BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert sorted(tmp_path.rglob("*")) == before
    for part in parts:
        assert part in printed.err.replace("'", "")


@pytest.mark.parametrize(("stages", "peers"), [(1, 3), (2, 4), (2, 5), (3, 4), (4, 8)])
def test_victims_leave_a_peer_in_every_stage(stages: int, peers: int) -> None:
    for count in range(peers - stages + 1):
        request = check(_request(stages=stages, peers=peers, kill=Kill(peers=count, step=5)))
        victims = request.victims()
        assert len(set(victims)) == count
        left = {request.stage_of(peer) for peer in range(peers) if peer not in victims}
        assert left == set(range(stages))


def _attacks(*texts: str) -> dict[str, Any]:
    return {"attacks": tuple(map(parse_attackers, texts))}


def test_attackers_are_the_last_peers_spread_over_the_stages_and_none_of_those_killed() -> None:
    request = check(_request(peers=8, **_attacks("sign_flip:1@10")))
    assert request.peers_per_stage == 4
    assert request.victims() == [7]
    assert request.attackers() == {6: Attack("sign_flip", 10)}
    several = check(_request(peers=8, **_attacks("sign_flip:3@10", "zeros:2@3"))).attackers()
    assert sorted(several) == [2, 3, 4, 5, 6]
    assert [several[peer].kind for peer in sorted(several)] == ["zeros", "zeros", "sign_flip", "sign_flip", "sign_flip"]


@pytest.mark.parametrize(("stages", "peers", "killed"), [(2, 4, 1), (2, 8, 1), (3, 7, 2), (4, 8, 0)])
def test_attackers_leave_an_honest_peer_that_lives_in_every_stage(stages: int, peers: int, killed: int) -> None:
    for count in range(peers - stages - killed + 1):
        kill = Kill(peers=killed, step=5)
        request = check(_request(stages=stages, peers=peers, kill=kill, **_attacks(f"alie:{count}@3")))
        bad = {*request.attackers(), *request.victims()}
        assert len(bad) == count + killed
        assert {request.stage_of(peer) for peer in range(peers) if peer not in bad} == set(range(stages))


def test_attackers_are_of_stages_where_their_kind_does_something() -> None:
    request = check(_request(peers=8, **_attacks("activation_negate:2@1", "gradient_negate:2@1")))
    found = {(attack.kind, request.stage_of(peer)) for peer, attack in request.attackers().items()}
    assert found == {("activation_negate", 0), ("gradient_negate", 1)}


def test_kill_is_at_two_fifths_of_the_run_unless_asked_otherwise() -> None:
    assert parse_kill(None, 100) == Kill(peers=1, step=40)
    assert parse_kill("2@7", 100) == Kill(peers=2, step=7)
    assert parse_kill("0@0", 100).peers == 0


def test_manifest_says_what_the_demo_counts_with(tmp_path: Path) -> None:
    odd = tmp_path / 'a "text" of\\mine.txt'
    odd.write_text(NUMBERS)
    request = check(_request(stages=3, peers=7, steps=33, seed=5, delay=1, text=(odd,), out=tmp_path / "out"))
    manifest = parse_manifest(manifest_text(request), tmp_path / "run.toml")
    settings = freeze(manifest, assumed_data(manifest), ())
    assert manifest.data.text == (str(odd),)
    assert settings.model.num_stages == 3
    assert settings.limits.founders_per_stage == 2
    assert settings.optimizer.total_steps == 33
    assert settings.data.seed == 5
    assert settings.averaging.delay == 1
    assert settings.microbatches_per_step * settings.microbatch_tokens == BATCH_TOKENS


def test_a_run_in_windows_is_one(tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text(NUMBERS)
    request = check(_request(stages=1, peers=4, steps=12, local_steps=20, text=(text,), out=tmp_path / "out"))
    manifest = parse_manifest(manifest_text(request), tmp_path / "run.toml")
    settings = freeze(manifest, assumed_data(manifest), ())
    assert settings.has_windows
    assert settings.codecs.averaging == "int2"
    assert settings.step_tokens(4) == request.tokens_per_step == 20 * BATCH_TOKENS
    assert request.shape == "4 peers, the whole model on each, in windows of 20 local steps"
    observed = Observed(12, request.tokens_per_step, started_at=0.0, local_steps=20)
    observed.version = 3
    assert progress_text(observed).startswith("window 3/12")


def test_one_member_alone_learns_in_the_inner_steps_of_its_windows(tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text(NUMBERS)
    request = check(
        _request(
            stages=1, peers=2, steps=2, local_steps=2, kill=Kill(peers=0, step=0), text=(text,), out=tmp_path / "out"
        )
    )
    prepared = prepare(request)
    first, last = (held_out_alone(prepared, windows=windows, evaluate_tokens=512) for windows in (0, 2))
    assert last < first - 0.1
    assert abs(first - math.log(256)) < 0.3


def test_bigram_is_measured_on_the_tokens_the_host_evaluates(tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text(NUMBERS)
    prepared = prepare(check(_request(text=(text,), out=tmp_path / "out")))
    tokens = 3 * MICROBATCH_SIZE * SEQUENCE_LENGTH
    train = np.asarray(prepared.data.train().read(0, prepared.data.num_train_tokens))
    held_out = np.asarray(prepared.data.held_out().read(0, tokens + 1))
    expected = bigram_loss(train, held_out, vocab_size=256)
    assert held_out_bigram_loss(prepared.data, evaluate_tokens=tokens + 5) == expected


# -- what is shown ---------------------------------------------------------------------------------------------


def _observed(num_peers: int, num_steps: int) -> Observed:
    """A run of two stages that has come as far as step `num_steps`, one second a step."""
    observed = Observed(100, 2048, started_at=0.0, bigram_loss=2.5)
    for number in range(num_peers):
        observed.expect(f"12D3KooWpeer{number:08d}", number % 2, number)
        admitted = {"event": "admitted", "peer_id": f"12D3KooWpeer{number:08d}", "stage": number % 2}
        observed.take(admitted, now=5.0)
    observed.take({"event": "listening", "addresses": ["/ip4/127.0.0.1/tcp/1/p2p/x"]}, now=6.0)
    observed.take({"event": "genesis", "version": 0}, now=10.0)
    for step in range(num_steps):
        for number in range(num_peers):
            event = {"event": "step", "peer_id": f"12D3KooWpeer{number:08d}", "stage": number % 2, "step": step}
            figures = {"loss_sum": 0.0, "num_targets": 0} if number % 2 else {"loss_sum": 1500.0, "num_targets": 500}
            event |= {**figures, "microbatches": 2 * step, "sent_bytes": step * 10**6, "reassigned": 0}
            observed.take({**event, "busy_s": step * 0.5}, now=11.0 + step)
        observed.take({"event": "version", "version": step + 1}, now=11.0 + step)
        observed.take({"event": "checkpoint", "version": step + 1, "path": "x"}, now=11.0 + step)
    return observed


def test_events_become_speed_loss_and_load() -> None:
    observed = _observed(num_peers=4, num_steps=30)
    assert observed.version == 30
    assert observed.steps_per_s() == pytest.approx(1.0)
    assert observed.tokens_per_s() == pytest.approx(2048)
    assert observed.left_s() == pytest.approx(70)
    assert observed.recent_loss() == 3.0
    assert [peer.busy_share() for peer in observed.peers.values()] == [pytest.approx(0.5)] * 4
    assert {peer.state for peer in observed.peers.values()} == {"training"}


def test_peer_that_left_is_shown_as_such_and_comes_back_when_it_joins() -> None:
    observed = _observed(num_peers=4, num_steps=3)
    peer_id = "12D3KooWpeer00000001"
    observed.take({"event": "left", "peer_id": peer_id, "stage": 1, "reason": "unreachable"}, now=20.0)
    assert observed.peers[peer_id].state == "left"
    assert "unreachable" in observed.news[-1].text
    observed.take({"event": "joined", "peer_id": peer_id, "stage": 1}, now=30.0)
    assert observed.peers[peer_id].state == "training"


def test_ban_is_told_at_once_and_kept_for_the_report() -> None:
    observed = _observed(num_peers=4, num_steps=3)
    peer_id = "12D3KooWpeer00000001"
    ban = {"peer_id": peer_id, "stage": 1, "kind": "replay_mismatch", "step": 2, "evidence": "run/evidence/1.bin"}
    observed.take({"event": "banned", **ban}, now=20.0)
    assert observed.bans == [ban]
    assert observed.news[-1].text == "banned: 00000001 of stage 1 for replay_mismatch at step 2"
    observed.take({"event": "left", "peer_id": peer_id, "stage": 1, "reason": "banned"}, now=21.0)
    observed.take({"event": "goodbye", "peer_id": peer_id, "stage": 1}, now=22.0)
    assert observed.peers[peer_id].state == "banned"


def test_a_fault_is_told_when_it_puts_a_peer_out_and_when_it_comes_back() -> None:
    observed = Observed(5, 2048, started_at=0.0)
    observed.take({"event": "quarantined", "peer_id": "peer", "stage": 1, "kind": "fault", "step": 3}, now=1.0)
    observed.take({"event": "pardoned", "peer_id": "peer", "stage": 1, "step": 4}, now=2.0)
    observed.take({"event": "promoted", "peer_id": "peer", "stage": 1, "step": 9}, now=3.0)
    told = [(item.text.partition(":")[0], item.is_bad) for item in observed.news]
    assert told == [("quarantined", True), ("pardoned", False), ("promoted", False)]


@pytest.mark.parametrize(
    ("kind", "events", "said"),
    [
        (
            "charges",
            ["quarantined"],
            "quarantined at step 3, for false_accusation; it has 25% of the credit",
        ),
        ("sign_flip", ["quarantined", "banned"], "banned at step 3"),
        ("claimed_ids", [], "stayed in: a list of which drawn entries"),
        ("zeros", [], "not put out so far"),
        ("zeros", ["quarantined", "pardoned"], "not put out so far"),
    ],
)
def test_what_came_of_an_attack_is_told_and_whether_others_were_wronged(
    kind: str, events: list[str], said: str
) -> None:
    observed = Observed(5, 2048, started_at=0.0)
    observed.expect("liar", 1, 0, Attack(kind, 1))
    observed.expect("honest", 1, 1)
    assert "before it began" in of_attacker(observed, observed.peers["liar"], {})
    observed.take({"event": "version", "version": 2}, now=0.5)
    for event in events:
        observed.take(
            {"event": event, "peer_id": "liar", "stage": 1, "kind": "false_accusation", "step": 3, "evidence": None},
            now=1.0,
        )
    assert said in of_attacker(observed, observed.peers["liar"], {"credit": {"liar": 1, "honest": 3, "elsewhere": 9}})
    assert honest_out(observed) == []
    observed.take({"event": "banned", "peer_id": "honest", "stage": 1, "kind": "fault", "step": 4}, now=2.0)
    assert honest_out(observed) == ["honest was banned at step 4, for fault"]


@pytest.mark.parametrize("from_step", [0, 1, 3])
def test_attack_is_told_once_when_it_begins(from_step: int) -> None:
    observed = Observed(100, 2048, started_at=0.0)
    observed.expect("12D3KooWpeer00000007", 1, 7, Attack("zeros", from_step))
    told = []
    observed.take({"event": "genesis", "version": 0}, now=1.0)
    for version in range(1, 6):
        told.append(sum("misbehaves" in item.text for item in observed.news))
        observed.take({"event": "version", "version": version}, now=1.0 + version)
    assert told == [int(from_step < version) for version in range(1, 6)]
    console = Console(width=80, height=24, force_terminal=True, file=io.StringIO(), record=True)
    console.print(LiveView(console, Live(console=console), "swarm demo", Path("address")).picture(observed, now=9.0))
    assert f"zeros@{from_step}" in console.export_text()


def _program(exit: int | None, *, killed: bool = False) -> Any:
    return SimpleNamespace(name="peer", exit=exit, killed=killed, log=Path("log"))


@pytest.mark.parametrize(
    ("attack", "is_banned", "exit", "ending"),
    [
        (None, False, 0, Ending.DONE),
        (None, False, 1, Ending.FAILED),
        (None, True, 1, Ending.DONE),
        (Attack("zeros"), True, 1, Ending.DONE),
        (Attack("zeros"), False, 1, Ending.DONE),
    ],
)
def test_run_is_judged_by_its_honest_peers(attack: Attack | None, is_banned: bool, exit: int, ending: Ending) -> None:
    observed = Observed(10, 2048, started_at=0.0)
    demo = Demo(SimpleNamespace(), observed, host=_program(0))  # type: ignore[arg-type]
    for number, status in enumerate((0, exit)):
        observed.expect(f"peer{number}", number, number, attack if number else None)
        demo.peers[f"peer{number}"] = _program(status)
    if is_banned:
        ban = {"peer_id": "peer1", "stage": 1, "kind": "step_fraud", "step": 2, "evidence": "file"}
        observed.take({"event": "banned", **ban}, now=1.0)
    assert demo._judged(Ending.DONE) is ending


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (60, 16)])
@pytest.mark.parametrize("num_peers", [4, 40])
@pytest.mark.parametrize("num_steps", [0, 2, 60])
def test_picture_fits_the_terminal(width: int, height: int, num_peers: int, num_steps: int) -> None:
    console = Console(width=width, height=height, force_terminal=True, file=io.StringIO(), record=True)
    shown = LiveView(console, Live(console=console), "swarm demo", Path("demo-out/address"))
    console.print(shown.picture(_observed(num_peers, num_steps), now=75.0))
    lines = console.export_text().rstrip("\n").split("\n")
    assert len(lines) < height
    assert max(len(line) for line in lines) <= width
    assert f"step {num_steps:>3}/100" in lines[1]
    assert any("00000000" in line for line in lines)


def test_log_has_news_at_once_and_progress_now_and_then(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        view = PlainView(Console(file=file, width=80), "swarm demo")
        observed = _observed(num_peers=2, num_steps=4)
        for now in (15.0, 15.25, 15.5, 26.0):
            view.show(observed, now=now)
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum("checkpoint" in line for line in lines) == 4
    assert sum("step 4/100" in line for line in lines) == 2


def test_loss_is_drawn(tmp_path: Path) -> None:
    losses = [(step, 5.0 - step * 0.01) for step in range(100)]
    path = tmp_path / "loss.png"
    write_loss_plot(path, losses, held_out={0: 5.1, 100: 4.2}, bigram=4.5, kills=[40], title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert smoothed([1.0, 2.0, 6.0, 3.0], 1) == [1.0, 3.0, pytest.approx(11 / 3), 3.0]


def test_report_holds_exit_codes_of_peers_the_host_never_saw() -> None:
    host = {"steps": 3, "held_out_loss": {"start": 5.0, "end": 4.0}, "peers": [{"peer_id": "b", "stage": 1}]}
    report = demo_report(
        host,
        exits={"a": 1, "b": -9},
        stages={"a": 0, "b": 1},
        kills={"b": 2},
        bigram=2.5,
        export_dir=None,
        extra={"out": "x"},
    )
    assert [(peer["peer_id"], peer["exit"], peer["killed_at"]) for peer in report["peers"]] == [
        ("a", 1, None),
        ("b", -9, 2),
    ]
    assert report["held_out_loss"] == {"start": 5.0, "end": 4.0, "bigram": 2.5, "alone": None}
    assert report["steps"] == 3


# -- whole demos -----------------------------------------------------------------------------------------------


def _left_behind(out: Path) -> list[str]:
    """Command lines of processes that have to do with `out`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if folder.name != str(os.getpid()) and any(str(out).encode() in argument for argument in arguments):
            found.append(b" ".join(arguments).decode())
    return found


def _until(what: str, condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


@pytest.mark.timeout(500)
@pytest.mark.processes
def test_short_demo_survives_a_kill_and_reports(tmp_path: Path) -> None:
    text, out, report_path = tmp_path / "numbers.txt", tmp_path / "out", tmp_path / "report.json"
    text.write_text(NUMBERS)
    arguments = ["demo", "--peers", "3", "--steps", "16", "--kill", "1@3", "--text", str(text), "--out", str(out)]
    done = subprocess.run(
        [*SWARM, *arguments, "--report", str(report_path)], capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_path.read_text())
    assert report["steps"] == 16
    # Who is killed in the middle of a round takes its sum of that step with it.
    assert report["lost_contributions"] <= 1
    assert 15 * BATCH_TOKENS < report["tokens"] <= 16 * BATCH_TOKENS
    assert len(report["loss"]) == 16
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]
    assert 0 < report["held_out_loss"]["bigram"] < 6
    assert report["lost_microbatches"] <= MICROBATCHES
    assert sorted(peer["exit"] for peer in report["peers"]) == [-9, 0, 0]
    killed = next(peer for peer in report["peers"] if peer["exit"] == -9)
    assert killed["stage"] == 0
    assert killed["killed_at"] >= 3
    for digests in report["state_digests"].values():
        assert len(set(digests.values())) == 1
    used = [number for numbers in report["microbatches"].values() for number in numbers]
    assert len(used) == len(set(used))
    assert (out / "model" / "model.safetensors").is_file()
    assert report["export_dir"] == str(out / "model")
    assert (out / "loss.png").is_file()
    assert "byte bigram" in done.stdout
    assert f"swarm generate {shown_path(out / 'model')}" in done.stdout
    assert _left_behind(out) == []


@pytest.mark.soak
@pytest.mark.drawn(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", sorted(STAYING))
def test_demo_of_a_lie_in_the_protocols_own_fields_ends_and_says_what_came_of_it(kind: str, tmp_path: Path) -> None:
    text, out = tmp_path / "numbers.txt", tmp_path / "out"
    text.write_text(NUMBERS)
    arguments = ["demo", "--steps", "24", "--attack", f"{kind}:1@6", "--text", str(text), "--out", str(out)]
    done = subprocess.run([*SWARM, *arguments], capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 24
    assert report["honest_shut_out"] == []
    (attack,) = report["attacks"]
    assert attack["kind"] == kind
    assert "what came of it" in done.stdout
    assert "nobody was shut out" in done.stdout
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]
    assert _left_behind(out) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tie between processes is Linux's")
def test_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = subprocess.Popen([*SWARM, "demo", "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until("the host starts", lambda: any("swarm host" in line for line in _left_behind(out)), 240)
        demo.send_signal(signal.SIGKILL)
        demo.wait()
        _until("all processes are gone", lambda: not _left_behind(out), 10)
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_interrupted_demo_drains_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = subprocess.Popen(
        [*SWARM, "demo", "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        events = out / "logs" / "events.jsonl"
        _until("a checkpoint", lambda: events.is_file() and '"checkpoint"' in events.read_text(), 300)
        demo.send_signal(signal.SIGINT)
        printed, _ = demo.communicate(timeout=120)
        assert demo.returncode == ExitCode.INTERRUPTED
        assert "run/checkpoints/step-000000" in printed
        assert _left_behind(out) == []
        assert run(["export", str(out / "run" / "checkpoints"), str(tmp_path / "model")]) is ExitCode.OK
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_run_that_lost_a_stage_fails_and_says_why(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*SWARM, "demo", "--peers", "2", "--out", str(out)]
    demo = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        events = out / "logs" / "events.jsonl"
        _until("a step", lambda: events.is_file() and '"version": 2' in events.read_text(), 300)
        (victim,) = [
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if str(out / "peers" / "1").encode() in (folder / "cmdline").read_bytes().split(b"\0")
        ]
        os.kill(victim, signal.SIGKILL)
        _, errors = demo.communicate(timeout=120)
        assert demo.returncode == ExitCode.FAILED
        assert "stage 1 has no peer left: peer 1 was killed by signal 9" in errors
        assert str(out / "logs" / "peer-1.log") in errors
        assert "Traceback" not in errors
        assert _left_behind(out) == []
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_default_demo_beats_the_bigram(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    arguments = [*SWARM, "demo", "--out", str(tmp_path / "out"), "--report", str(report_path)]
    subprocess.run(arguments, stdout=subprocess.DEVNULL, timeout=800, check=True)
    report = json.loads(report_path.read_text())
    assert report["held_out_loss"]["end"] < 2.49
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["bigram"]
    assert report["lost_microbatches"] <= MICROBATCHES
    assert report["lost_contributions"] == 1
