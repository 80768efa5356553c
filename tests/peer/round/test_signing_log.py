"""A peer never signs a second contribution for a step, however it was restarted."""

from pathlib import Path

from peer.round.signing_log import SigningLog

CHAIN, OTHER = bytes(32), bytes(range(32))


def test_a_step_is_signed_once(tmp_path: Path) -> None:
    log = SigningLog(tmp_path / "signed.log")
    assert log.may_sign(CHAIN, 5)
    log.record(CHAIN, 5, b"statement")
    assert not log.may_sign(CHAIN, 5)
    assert not log.may_sign(CHAIN, 4)
    assert log.may_sign(CHAIN, 6)


def test_a_restarted_peer_signs_again_two_steps_on(tmp_path: Path) -> None:
    SigningLog(tmp_path / "signed.log").record(CHAIN, 5, b"statement")
    log = SigningLog(tmp_path / "signed.log")
    assert [log.may_sign(CHAIN, step) for step in (5, 6, 7)] == [False, False, True]


def test_a_stage_that_begins_anew_is_another_chain(tmp_path: Path) -> None:
    SigningLog(tmp_path / "signed.log").record(CHAIN, 5, b"statement")
    assert SigningLog(tmp_path / "signed.log").may_sign(OTHER, 3)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "signed.log"
    SigningLog(path).record(CHAIN, 5, b"statement")
    with path.open("a") as file:
        file.write('{"lineage": "00')
    log = SigningLog(path)
    assert not log.may_sign(CHAIN, 6)
    assert log.may_sign(CHAIN, 7)
