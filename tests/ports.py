"""Ports that a test may listen on, let go of and listen on again.

A port the system chose is one it may give to any other connection as soon as nobody listens there. These lie below
all that it chooses itself.
"""

import itertools
import os
import socket

IN_A_ROW = 5
_LOWEST, _END = 20_000, 32_000
_numbers = itertools.count(os.getpid() * 37)  # test processes that run side by side begin in different places


def own_port() -> int:
    """The first of five in a row that nobody listens on, and that this process was not given before."""
    rows = (_END - _LOWEST) // IN_A_ROW
    for number in itertools.islice(_numbers, rows):
        first = _LOWEST + number % rows * IN_A_ROW
        if all(is_free(port) for port in range(first, first + IN_A_ROW)):
            return first
    raise AssertionError("no free ports for tests")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
