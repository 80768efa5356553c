"""Numbers for people: two or three digits and the unit that fits. And lines that end between words."""

import shutil
import sys
import textwrap

_COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))


def count_text(number: float) -> str:
    """Of parameters or tokens: 999, 1.21 M, 12.3 B."""
    for scale, unit in _COUNTS:
        if number >= 0.9995 * scale:  # what rounds to a thousand of the unit below is one of this
            return f"{_digits(number / scale, 3)} {unit}"
    return _digits(number, 3)


def size_text(size_bytes: float) -> str:
    """Of bytes, in powers of ten, as narrow as a table of them needs: 512 B, 1.9 MB, 110 MB."""
    for scale, unit in _SIZES:
        if size_bytes >= 0.9995 * scale:
            number = size_bytes / scale
            return f"{number:.1f} {unit}" if number < 99.95 else f"{number:,.0f} {unit}"
    return f"{size_bytes:.0f} B"


def duration_text(seconds: float) -> str:
    """Of a second or longer, in the unit of which there are at least two: 90 s, 5 min, 36 h, 3.5 days, 36 days."""
    if seconds >= 10 * _TIMES[0][0]:
        return f"{seconds / _TIMES[0][0]:,.0f} days"
    for scale, unit in _TIMES:
        if seconds >= 2 * scale:
            return f"{_digits(seconds / scale, 2)} {unit}"
    return f"{_digits(seconds, 2)} s"


def wrapped(text: str) -> str:
    """A paragraph for standard output: as wide as the terminal there, in one line where there is none."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _digits(number: float, digits: int) -> str:
    """At least so many, and all that stand before the point."""
    return f"{number:.{digits}g}" if number < 10**digits - 0.5 else f"{number:,.0f}"
