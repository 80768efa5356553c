"""Numbers for people: what is on the edge of two units, and of three digits; lines that end between words."""

import sys

import pytest

from swarm.readable import count_text, duration_text, size_text, wrapped


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1 k"),
        (1234, "1.23 k"),
        (999_600, "1 M"),
        (1.1e9, "1.1 B"),
        (2.5e13, "25,000 B"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (1e3, "1.0 kB"), (1_944_000, "1.9 MB"), (999.7e6, "1.0 GB"), (5.25e12, "5,250 GB")],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (119, "119 s"),
        (300, "5 min"),
        (7199, "120 min"),
        (129_600, "36 h"),
        (302_400, "3.5 days"),
        (1e9, "11,574 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_paragraph_is_as_wide_as_the_terminal_and_whole_for_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the most that settings give is 0.57 of it, with codecs.activations = 'int4'"
    assert wrapped(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "24")
    lines = wrapped(text).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 24
    assert " ".join(lines) == text
