"""What a stranger writes is read in a log, and acts on no terminal."""

import io
import logging
from pathlib import Path

import click
import pytest

from peer.program.state_folder import StateFolder
from swarm.cli import ExitCode, run
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.log_format import LogFormatter, log_to_terminal
from swarm.network.punch.seen import Judge, Seen

CLEARS = "\x1b[2J\x1b]0;all is well\x07"
FORGED = f"{CLEARS}\n2026-01-01 INFO peer: promoted"
OWNER = Identity.from_seed(b"owner".ljust(32))


def refused_word() -> RemoteError:
    """What comes of a word that names who it is on as it likes."""
    word = Seen(OWNER.peer_id, PeerId(FORGED), "203.0.114.5", 4000, 0).signed_by(OWNER)
    with pytest.raises(RemoteError) as refused:
        Judge(None, lambda peer: True).endpoint([word], OWNER.peer_id, now=0.0)
    return refused.value


def logged(formatter: logging.Formatter) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger = logging.Logger("peer")
    logger.addHandler(handler)
    logger.info("%s is not reached by hole punching: %s", OWNER.peer_id, refused_word())
    return out.getvalue()


def test_what_a_stranger_says_is_one_line_without_a_terminals_commands() -> None:
    assert FORGED in logged(logging.Formatter())
    said = logged(LogFormatter())
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()
    assert "\\x1b[2J" in said
    assert "na\u00efve \u2714" in LogFormatter().format(
        logging.LogRecord("n", 20, "", 0, "na\u00efve \u2714", (), None)
    )


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    try:
        raise RemoteError("protocol", CLEARS)
    except RemoteError as error:
        record = logging.LogRecord("peer", 40, "", 0, "failed", (), (type(error), error, error.__traceback__))
    lines = LogFormatter().format(record).split("\n")
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)


def test_every_log_is_written_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: made.extend(given["handlers"]))
    log_to_terminal(verbose=True)
    made.append(StateFolder(tmp_path / "state").log_handler())
    assert all(isinstance(handler.formatter, LogFormatter) for handler in made)


def test_what_a_verb_ends_with_acts_on_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A host that refuses says why, in its own words."""

    @click.command()
    def refused() -> None:
        raise RemoteError("standing", "not\nnow\x1b]0;mine\x07")

    assert run([], of=refused) is ExitCode.FAILED
    assert capsys.readouterr().err == "swarm: not\nnow\\x1b]0;mine\\x07\n"
