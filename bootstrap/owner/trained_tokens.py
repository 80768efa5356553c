"""How many target tokens the weights of each version were trained on, by the ledger."""

from typing import Any

from bootstrap.program.ledger import Event, Ledger

KINDS = ("rollback", "result")
"""The events that are looked at."""


class TrainedTokens:
    """By version. After a rollback it goes on from the version gone back to: tokens of an abandoned branch are none."""

    def __init__(self) -> None:
        self._last_event = 0
        self._by_version: dict[int, int] = {}

    def at(self, version: int) -> int:
        """0 where nothing is known of the version."""
        return self._by_version.get(version, 0)

    def versions(self) -> list[int]:
        """Those that were made by training, in order."""
        return sorted(self._by_version)

    def catch_up(self, ledger: Ledger) -> None:
        """Take what the ledger has beyond what is in here."""
        for event in ledger.events(*KINDS, after=self._last_event):
            self.take(event)

    def take(self, event: Event) -> None:
        """The next event, of whatever kind."""
        self._last_event = event.number
        facts: Any = event.facts
        if event.kind == "rollback":
            self._by_version[facts["version"]] = self.at(facts["to"])
        elif event.kind == "result" and facts["stage"] == 0:
            done = sum(num_tokens for _, _, num_tokens in facts["credit"])
            self._by_version[facts["step"] + 1] = self.at(facts["step"]) + done
