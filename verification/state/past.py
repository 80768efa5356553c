"""A stage's way to a version, shown: a beginning signed by the run key, and certified results since."""

from dataclasses import dataclass
from typing import TypeAlias

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.forms import Wire
from swarm.core.round.contribution import Result
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.identity.key import verify
from swarm.manifest.signed_run import SignedRun
from verification.state.anchor import Anchor

Beginning: TypeAlias = Anchor | Genesis

MAX_RESULTS = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Past(Wire):
    """What everyone who has the run key's peer id can fold to the same chain."""

    beginning: Beginning
    results: tuple[Result, ...] = ()
    """Of the rounds since, in order."""

    def first_chain(self, run: SignedRun) -> StageChain:
        """The chain at the beginning. Raises RemoteError unless this run's key signed it, for a stage under just these
        amendments."""
        beginning, run_id, run_key = self.beginning, run.run_id, run.run_key
        amendments = beginning.chain.amendments if isinstance(beginning, Anchor) else beginning.amendments
        if amendments != len(run.amendments):
            raise RemoteError("amended", f"a past under {amendments} amendments, a run of {len(run.amendments)}")
        if isinstance(beginning, Anchor):
            beginning.check(run_id=run_id, run_key=run_key)
            return beginning.chain
        if (beginning.run_id, beginning.run_key) != (run_id, run_key):
            raise RemoteError("anchor", f"genesis of run {beginning.run_id[:12]}, not {run_id[:12]}, or of another key")
        if not verify(run_key, beginning.signed_bytes(), beginning.signature):
            raise RemoteError("anchor", f"the genesis of stage {beginning.stage} is not signed by the run key")
        return StageChain.begin(beginning, run.in_force)

    def to_value(self) -> Value:
        return {
            "by": self.beginning.DOMAIN,
            "beginning": self.beginning.to_value(),
            "results": [result.to_value() for result in self.results],
        }

    @classmethod
    def from_value(cls, value: Value) -> "Past":
        """Raises RemoteError("malformed")."""
        fields = Fields("past", value)
        by = fields.text("by")
        if by not in _BEGINNINGS:
            raise RemoteError("malformed", f"past begins with {by[:20]!r}, not {' or '.join(_BEGINNINGS)}")
        made = cls(
            beginning=_BEGINNINGS[by].from_value(fields.message("beginning")),
            results=fields.items("results", Result.from_value, max_items=MAX_RESULTS),
        )
        fields.done()
        return made


_BEGINNINGS: dict[str, type[Anchor] | type[Genesis]] = {Anchor.DOMAIN: Anchor, Genesis.DOMAIN: Genesis}
