"""A run's kernels, where the machine does not have them yet, compiled by a process of its own.

The compiler gives back nothing of what it took, 0.1 GiB: `python -m swarm.local.compiling`, which has the run's
settings from its input, takes that with it when it ends.
"""

import logging
import subprocess
import sys
import tempfile
import threading
import time

from kernels.compiled import NotKeptError, only_kept
from swarm.core.canonical import unpack
from swarm.core.errors import TransientError
from swarm.core.settings import RunSettings
from swarm.local.rehearsal import rehearse
from swarm.local.tied_program import tied
from swarm.manifest.signed_run import MAX_SETTINGS_BYTES
from swarm.manifest.value import settings_bytes, settings_from_value

log = logging.getLogger(__name__)

LONGEST_S = 1800.0
"""A minute or two; on a machine that does much else it takes longer."""
LOOK_S = 0.1
_one_at_a_time = threading.Lock()
"""Of several peers in a process the others find what the first has had compiled."""


def rehearse_apart(settings: RunSettings, leaving: threading.Event) -> None:
    """As `rehearse`, with what is not compiled yet compiled elsewhere, or here where that fails.

    Raises TransientError once `leaving` is set.
    """
    with _one_at_a_time:
        try:
            with only_kept():
                rehearse(settings)
            return
        except NotKeptError:
            log.info("kernels are compiled for this machine, once: a minute or two")
        try:
            _compile(settings, leaving)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("no process of its own compiles them (%s); this one does", error)
        rehearse(settings)


def _compile(settings: RunSettings, leaving: threading.Event) -> None:
    """Raises OSError, SubprocessError or TransientError, and leaves no process behind."""
    command = tied(__name__)
    give_up_at = time.monotonic() + LONGEST_S
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(settings_bytes(settings))
        given.seek(0)
        with subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for the peer, which then ends this
        ) as process:
            while process.poll() is None:
                if leaving.wait(LOOK_S) or time.monotonic() > give_up_at:
                    process.kill()
        if leaving.is_set():
            raise TransientError("leaving: kernels are compiled another time")
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            raise subprocess.SubprocessError(lines[-1] if lines else f"ended with {process.returncode}")


if __name__ == "__main__":
    rehearse(settings_from_value(unpack(sys.stdin.buffer.read(), max_bytes=MAX_SETTINGS_BYTES)))
