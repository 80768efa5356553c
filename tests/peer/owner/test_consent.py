"""What a volunteer is told before it joins is all there, and nobody joins who did not say yes."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from bootstrap.state.run_folder import PreparedRun
from peer.owner.consent import ask, offer, show_and_ask
from swarm.core.owner.limits import OwnerLimits
from swarm.question import DECLINED
from tests.swarm_in_process import manifest_of, prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    licences = {"name": "a-run", "model_licence": "Apache-2.0", "data_licence": "PSF-2.0"}
    return prepare(manifest_of(run=licences), tmp_path_factory.mktemp("run"))


def test_an_offer_tells_the_run_its_key_its_licences_its_costs_and_the_limits(prepared: PreparedRun) -> None:
    limits = OwnerLimits().changed({"month-gb": "500", "upload-mbit": "10"})
    told = offer(prepared.signed, prepared.settings, None, limits)
    assert told["run"] == f"a-run, id {prepared.run_id[:16]}"
    assert told["host's key"] == prepared.run_key.peer_id
    assert told["licences"] == "model: Apache-2.0; data: PSF-2.0"
    for who in ("the host", "other peers of the run", "mirrors", "see this machine's IP address"):
        assert who in told["your address"]
    assert "GB a month" in told["traffic"]
    assert "never more than 500" in told["traffic"]
    assert "minutes" in told["time to join"]
    assert "GiB" in told["memory"]
    assert "upload-mbit 10" in told["limits"]
    assert "among friends" in told["checks"]
    assert "one that lies is banned" not in told["checks"]
    assert "on-battery pause" in told["limits"]
    assert "one of 2 stages" in told["model"]
    assert "stage 1" in offer(prepared.signed, prepared.settings, 1, limits)["model"]


def test_an_offer_tells_of_adapters_and_of_what_they_stand_on(tmp_path: Path) -> None:
    run = prepare(manifest_of(adapters={"rank": 4, "base": "nf4"}), tmp_path)
    told = offer(run.signed, run.settings, None, OwnerLimits())["model"]
    assert told.startswith("8.19 k parameters of adapters (LoRA, rank 4), on 53.5 k frozen in 4 bits;")


def answering(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, answer: bool) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal)
    monkeypatch.setattr(click, "confirm", lambda question: answer)


def test_nobody_joins_without_a_yes(
    prepared: PreparedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prepared.signed, prepared.settings, None, OwnerLimits()
    answering(monkeypatch, terminal=True, answer=True)
    show_and_ask(*asked)
    said = " ".join(capsys.readouterr().out.split())
    for text in offer(*asked).values():
        assert " ".join(text.split())[:40] in said
    answering(monkeypatch, terminal=True, answer=False)
    with pytest.raises(click.exceptions.Exit) as declined:
        show_and_ask(*asked)
    assert declined.value.exit_code == DECLINED
    answering(monkeypatch, terminal=False, answer=True)
    with pytest.raises(click.UsageError, match="give --yes to join"):
        show_and_ask(*asked)


def test_the_owner_is_asked_once_for_all_peers_of_the_daemon(
    prepared: PreparedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    async def join(*, answer: bool) -> list[BaseException | None]:
        monkeypatch.setattr(click, "confirm", lambda question: asked.append(question) or answer)
        consent = ask(None, OwnerLimits(), 2)
        joining = (consent(prepared.signed, prepared.settings) for _ in range(2))
        return await asyncio.gather(*joining, return_exceptions=True)

    assert asyncio.run(join(answer=True)) == [None, None]
    assert [type(error) for error in asyncio.run(join(answer=False))] == [click.exceptions.Exit] * 2
    assert len(asked) == 2
    told = [offer(prepared.signed, prepared.settings, 0, OwnerLimits(), number) for number in (1, 2)]
    assert "stage 0 on each of 2 GPUs" in told[1]["model"]
    assert told[0]["traffic"] != told[1]["traffic"]
    memory = [f"{size} GiB, the program itself included" for size in ("0.4", "0.5")]
    assert [one["memory"] for one in told] == memory, "the program counts once"


def test_what_a_host_calls_its_licences_hides_nothing_and_ends_nothing(
    prepared: PreparedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was read as rich's markup: text that is not shown, a link to elsewhere, or a traceback."""
    answering(monkeypatch, terminal=True, answer=True)
    settings = replace(prepared.settings, model_licence="[/]", data_licence="MIT [conceal]and more[/conceal]")
    show_and_ask(prepared.signed, settings, None, OwnerLimits())
    assert "model: [/]; data: MIT [conceal]and more[/conceal]" in " ".join(capsys.readouterr().out.split())
