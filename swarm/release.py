"""Releases and wire protocols, compared: whoever is too old is told how to upgrade."""

import re

from swarm.core.errors import SettingsError, UpgradeNeeded

__version__ = "0.1.0"
PROTOCOL = 1
"""Number of the wire protocol; peers of another number are refused by name."""

UPGRADE_COMMAND = "pip install --upgrade homeswarm"
_RELEASE = re.compile(r"\d{1,6}(\.\d{1,6}){0,3}")


def checked_release(text: str) -> str:
    """The release, if it is one like 1.2.3. Raises SettingsError."""
    if not _RELEASE.fullmatch(text):
        raise SettingsError(f"--minimum-release {text}: give a release such as {__version__}")
    return text


def check_protocol(protocol: int) -> None:
    """Raises UpgradeNeeded unless this release speaks the run's wire protocol."""
    if protocol > PROTOCOL:
        raise UpgradeNeeded(
            f"the run speaks wire protocol {protocol}, this is homeswarm {__version__} with protocol {PROTOCOL}; "
            f"upgrade with `{UPGRADE_COMMAND}`"
        )
    if protocol < PROTOCOL:
        raise UpgradeNeeded(
            f"the run speaks wire protocol {protocol}, older than protocol {PROTOCOL} of this homeswarm {__version__}; "
            "install the release that its host names"
        )


def check_release(minimum: str) -> None:
    """Raises UpgradeNeeded if the host takes in newer releases only. A stranger's word that is no release is none."""
    if _RELEASE.fullmatch(minimum) and _numbers(__version__) < _numbers(minimum):
        raise UpgradeNeeded(
            f"the run's host takes in homeswarm {minimum} and newer, this is {__version__}; upgrade with "
            f"`{UPGRADE_COMMAND}`"
        )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in (release.split(".") + ["0"] * 4)[:4] if part.isdigit())
