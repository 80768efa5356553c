"""A stage's way to a version, shown: a beginning signed by the run key, and certified results since."""

from dataclasses import dataclass
from typing import Annotated

from swarm.core.errors import RemoteError
from swarm.core.forms import Either
from swarm.core.layout import AtMost
from swarm.core.record import Record
from swarm.core.round.contribution import Result
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.identity.key import verify
from swarm.manifest.signed_run import SignedRun
from verification.state.anchor import Anchor

MAX_RESULTS = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Past(Record):
    """What everyone who has the run key's peer id can fold to the same chain."""

    beginning: Annotated[Anchor | Genesis, Either({"anchor": Anchor, "genesis": Genesis})]
    results: Annotated[tuple[Result, ...], AtMost(MAX_RESULTS)] = ()
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
