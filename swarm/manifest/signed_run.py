"""A run as its key has signed it: its first settings, and the amendments that are in force.

An amendment begins an era: the stages begin anew at its version, from what they were, and whatever is of an era is
made, certified and judged by its settings. Who knows fewer amendments than a genesis names takes no part.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from swarm.core.canonical import Value, digest, unpack
from swarm.core.errors import RemoteError, SettingsError
from swarm.core.forms import Digest, Integer, Octets
from swarm.core.ids import PeerId, RunId, Version
from swarm.core.kept import once
from swarm.core.layout import AtMost
from swarm.core.record import Signed
from swarm.core.settings import RunSettings
from swarm.identity.key import verify
from swarm.identity.signed_record import SignedRecord
from swarm.manifest.amendment import MAX_CHANGES_BYTES, Changes, amended, unpacked_changes
from swarm.manifest.value import named_run, settings_from_value

MAX_SETTINGS_BYTES = 1 << 20
MAX_AMENDMENTS = 64
MAX_SIGNED_RUN_BYTES = 8 << 20
NOTHING_BEFORE = bytes(32)


@dataclass(frozen=True)
class Ending(SignedRecord):
    """The run key's word that an era ends at a version, to be amended: nobody who knows it takes a step beyond.

    Of two of one era the later version holds: the stages had gone too far for the earlier.
    """

    DOMAIN: ClassVar[str] = "ending"
    run_id: str
    era: Annotated[int, Integer(high=1 << 32)]
    version: Version
    changes: Annotated[bytes, Octets(max_length=MAX_CHANGES_BYTES)]
    """What is to be amended; for people, nothing follows from it."""


@dataclass(frozen=True)
class Amendment(SignedRecord):
    """The run key's word that the settings are others from a version on, at which the stages begin anew."""

    DOMAIN: ClassVar[str] = "amendment"
    run_id: str
    number: Annotated[int, Integer(low=1, high=MAX_AMENDMENTS)]
    """From 1."""
    previous: Digest
    """The name of the amendment before it; zeros for the first."""
    version: Version
    changes: Annotated[bytes, Octets(max_length=MAX_CHANGES_BYTES)]
    """`swarm.manifest.amendment.packed_changes`."""

    @property
    def name(self) -> bytes:
        return digest("amendment-name", self.signed_value())

    @property
    def changed(self) -> Changes:
        """Raises RemoteError for what no amendment may change."""
        return unpacked_changes(self.changes)


@dataclass(frozen=True)
class SignedRun(Signed, kind="run"):
    """A run's first settings in canonical bytes, under the signature of its run key, and its amendments."""

    DOMAIN: ClassVar[str] = "run"
    settings: Annotated[bytes, Octets(max_length=MAX_SETTINGS_BYTES)]
    run_key: PeerId
    amendments: Annotated[tuple[Amendment, ...], AtMost(MAX_AMENDMENTS)] = ()
    """In order."""

    def signed_value(self) -> Value:
        return [self.run_key, self.settings]

    def _check_fields(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises RemoteError unless the run key signed the settings, and the amendments one after the other; nothing
        else is ever read."""
        if not verify(self.run_key, self.signed_bytes(), self.signature):
            raise RemoteError("signature", "the run's settings are not signed by the run key", self.run_key)
        before, since = NOTHING_BEFORE, 0
        for number, one in enumerate(self.amendments, start=1):
            if (one.run_id, one.number, one.previous) != (self.run_id, number, before) or one.version < since:
                raise RemoteError("malformed", f"amendment {number} does not follow what is before it", self.run_key)
            if not one.is_signed_by(self.run_key):
                raise RemoteError("signature", f"amendment {number} is not signed by the run key", self.run_key)
            before, since = one.name, int(one.version)

    @once
    def protocol(self) -> Value:
        """The wire protocol that the settings name."""
        value = unpack(self.settings, max_bytes=MAX_SETTINGS_BYTES)
        return value.get("protocol") if isinstance(value, dict) else None

    @once
    def run_id(self) -> RunId:
        """Of the first settings: an amended run is the same run. Raises RemoteError."""
        return named_run(unpack(self.settings, max_bytes=MAX_SETTINGS_BYTES), self.run_key)

    @once
    def first(self) -> RunSettings:
        """The settings before any amendment. Raises RemoteError if they are of another protocol, or wrong."""
        return settings_from_value(unpack(self.settings, max_bytes=MAX_SETTINGS_BYTES))

    @once
    def in_force(self) -> RunSettings:
        """The settings with all amendments. Raises RemoteError."""
        settings = self.first
        for one in self.amendments:
            try:
                settings = amended(settings, one.changed)
            except SettingsError as error:
                raise RemoteError("malformed", f"amendment {one.number}: {error}", self.run_key) from error
        return settings

    def under(self, number: int) -> Self:
        """The run before its later amendments: under so many. Raises RemoteError if it has not so many."""
        if number > len(self.amendments):
            raise RemoteError("amended", f"{number} amendments, {len(self.amendments)} are known", self.run_key)
        return replace(self, amendments=self.amendments[:number])

    def could_be_of(self, version: int, known: "SignedRun", *, shows_era: bool) -> bool:
        """Whether what was done at that version of the run, as it is `known`, was under these amendments.

        At the version at which one begins there are states, and contributions, of the era before and of the next: what
        does not itself show of which it is can be held against neither's settings.
        """
        count, after = len(self.amendments), known.amendments[len(self.amendments) :]
        began = self.amendments[-1].version if self.amendments else 0
        is_prefix = (self.settings, self.run_key) == (known.settings, known.run_key) and (
            self.amendments == known.amendments[:count]
        )
        if not shows_era and version in [one.version for one in known.amendments]:
            return False
        return is_prefix and began <= version and (not after or version <= after[0].version)
