"""What a month and a day allow, counted over restarts: traffic, and bytes written to disk."""

import json
import logging
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from swarm.core.errors import SettingsError
from swarm.disk.durable_lines import replace_lines

log = logging.getLogger(__name__)


@dataclass
class Usage:
    """Counters of one calendar month and one day, in local time."""

    month: str = ""
    month_bytes: int = 0
    """Sent and received."""
    relayed_bytes: int = 0
    """Of the month: carried for others, each of them once."""
    day: str = ""
    written_today_bytes: int = 0

    def add(self, *, traffic_bytes: int, written_bytes: int, today: date, relayed_bytes: int = 0) -> None:
        """What came on top since the last time. A new month, or day, begins at nothing."""
        month, day = today.strftime("%Y-%m"), today.isoformat()
        if month != self.month:
            self.month, self.month_bytes, self.relayed_bytes = month, 0, 0
        if day != self.day:
            self.day, self.written_today_bytes = day, 0
        self.month_bytes += traffic_bytes
        self.relayed_bytes += relayed_bytes
        self.written_today_bytes += written_bytes

    def save(self, path: Path) -> None:
        """Raises OSError."""
        replace_lines(path, [json.dumps(asdict(self))])

    @classmethod
    def load(cls, path: Path) -> "Usage":
        """What was saved; nothing used if there is no file. Raises SettingsError if it was damaged."""
        try:
            read = json.loads(path.read_text())
            return cls(
                month=str(read["month"]),
                month_bytes=max(0, int(read["month_bytes"])),
                relayed_bytes=max(0, int(read.get("relayed_bytes", 0))),
                day=str(read["day"]),
                written_today_bytes=max(0, int(read["written_today_bytes"])),
            )
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{path}: cannot be read ({error}), so this month's traffic is unknown; delete it to count from nothing"
            ) from error
