"""What the host once told a daemon under the run key, kept so that it comes back without the host.

What is kept is believed as little as the host itself: signatures are checked again each time.
"""

import logging
from pathlib import Path

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.disk.whole_file import whole_file

log = logging.getLogger(__name__)

MAX_BYTES = 32 << 20


class KeptAnswers:
    """Answers by what they are about, in a file."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: nothing is kept."""
        self._path = path
        self._answers = {} if path is None else _load(path)

    def get(self, about: str) -> dict[str, Value] | None:
        return self._answers.get(about)

    @property
    def is_enough(self) -> bool:
        """Whether this daemon has once joined, and so may again."""
        return {"run", "admit", "genesis"} <= {about.partition(" ")[0] for about in self._answers}

    def keep(self, about: str, answer: dict[str, Value]) -> None:
        """In the place of an earlier one."""
        if self._path is None or self._answers.get(about) == answer:
            return
        self._answers[about] = answer
        try:
            with whole_file(self._path) as partial:
                partial.write_bytes(pack(dict(self._answers)))
        except OSError as error:  # without it the host is needed at the next start, as before
            log.warning("%s: %s", self._path, error)


def _load(path: Path) -> dict[str, dict[str, Value]]:
    try:
        read = unpack(path.read_bytes()[: MAX_BYTES + 1], max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, RemoteError) as error:
        log.warning("%s: %s; it is made anew", path, error)
        return {}
    answers = read if isinstance(read, dict) else {}
    return {about: answer for about, answer in answers.items() if isinstance(answer, dict)}
