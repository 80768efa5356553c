"""Ports that a test may listen on, let go of and listen on again.

A port the system chose is one it may give to any other connection as soon as nobody listens there. These lie below
all that it chooses itself, and are this test process' until it ends.
"""

import itertools
import os
import socket

IN_A_ROW = 5
_LOWEST, _END = 20_000, 32_000
_ROWS = (_END - _LOWEST) // IN_A_ROW
_KEEPERS = _LOWEST - _ROWS
"""Of each row one port below all rows: whoever is bound to it has the row, also while nobody listens there."""
_kept: list[socket.socket] = []
_numbers = itertools.count(os.getpid() * 37)  # test processes that run side by side begin in different places


def own_port() -> int:
    """The first of five in a row that nobody listens on, and that neither this nor another test process was given."""
    for number in itertools.islice(_numbers, _ROWS):
        row = number % _ROWS
        first, keeper = _LOWEST + row * IN_A_ROW, socket.socket()
        try:
            keeper.bind(("127.0.0.1", _KEEPERS + row))
        except OSError:
            keeper.close()
            continue
        if all(is_free(port) for port in range(first, first + IN_A_ROW)):
            _kept.append(keeper)
            return first
        keeper.close()
    raise AssertionError("no free ports for tests")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
