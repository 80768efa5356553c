"""A peer's key on disk: one file, readable by its owner only, never half written."""

import logging
import os
import secrets
import stat
from pathlib import Path

from swarm.core.errors import SettingsError
from swarm.identity.key import Identity

logger = logging.getLogger(__name__)

_MAX_KEY_FILE_BYTES = 1 << 16


def load_or_create_identity(path: Path) -> Identity:
    """The identity at `path`, made on first use with mode 0600 in a folder of mode 0700.

    Raises SettingsError when the file is of another format or cannot be read or written.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SettingsError(
            f"identity = {str(path)!r}: cannot be read ({error.strerror}); name another path"
        ) from error
    try:
        _create(path, Identity.generate())
    except OSError as error:
        raise SettingsError(
            f"identity = {str(path)!r}: cannot be written ({error.strerror}); name a path in a folder of your own"
        ) from error
    return _load(path)


def load_identity(path: Path) -> Identity:
    """The identity at `path`. Raises SettingsError when there is none, or none that can be read."""
    try:
        return _load(path)
    except OSError as error:
        raise SettingsError(f"identity = {str(path)!r}: cannot be read ({error.strerror}); name its --dir") from error


def save_identity(path: Path, identity: Identity) -> None:
    """Keep an identity that came from elsewhere. Raises SettingsError when there is another one already."""
    if path.exists():
        raise SettingsError(f"identity = {str(path)!r}: {_load(path).peer_id} is there already; move it away first")
    _create(path, identity)


def _load(path: Path) -> Identity:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        data = file.read(_MAX_KEY_FILE_BYTES)
    if mode & 0o077:
        logger.warning("identity file %s has mode %03o: others on this machine may read it; chmod 600 it", path, mode)
    try:
        return Identity.from_key_file_bytes(data)
    except SettingsError as error:
        raise SettingsError(f"identity = {str(path)!r}: {error}") from error


def _create(path: Path, identity: Identity) -> None:
    """Write, sync, then link into place: of several that start at once one wins, and all load its key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.to_key_file_bytes())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        logger.info("new identity %s written to %s", identity.peer_id, path)
    finally:
        draft.unlink()
