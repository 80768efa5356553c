"""What becomes of a request to p2pd that cannot be made."""

import asyncio
import errno
from pathlib import Path
from typing import NoReturn

import pytest

from swarm.network.p2pd import control
from swarm.network.p2pd.control import ControlClient, ControlError


def test_who_has_no_file_left_to_open_is_told_as_if_p2pd_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(control.socket, "socket", refuse)
            with pytest.raises(ControlError, match="too many open files"):
                await ControlClient(Path("nowhere")).remote_hosts()

    asyncio.run(main())
