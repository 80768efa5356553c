"""The host's share in the beacon: a hash chain for each stage and era, told as far as its versions are certified."""

import hashlib
from collections.abc import Mapping

from bootstrap.round.followed_stage import FollowedStage
from bootstrap.state.run_folder import PreparedRun
from swarm.core.audit.beacon import Beacon
from swarm.core.audit.chance import HostWord
from swarm.core.audit.hash_chain import HashChain
from swarm.core.canonical import signed_bytes
from swarm.core.errors import TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Roster
from swarm.host_protocol import BEACON
from swarm.network.transport import Message, Transport

KEPT_ERAS = 2
"""The present one, and the next: what has been told of an earlier one is of use to nobody."""


class HostChains:
    """The host's own chance. It follows from the run key: a host that is started again has the same.

    In another era the stages have other chains: versions are made again there whose values have been told.
    """

    def __init__(self, run: PreparedRun) -> None:
        self._run = run
        self._made: dict[tuple[int, int], HashChain] = {}

    def of(self, stage: int, era: int) -> HashChain:
        """Made when it is asked for first, which takes as long as for a peer."""
        found = self._made.get((stage, era))
        if found is None:
            named = signed_bytes("beacon-seed", [self._run.run_id, stage, era])
            seed = hashlib.sha256(self._run.run_key.sign(named)).digest()
            found = self._made[stage, era] = HashChain.of_run(seed, self._run.settings.optimizer.total_steps)
            for old in [one for one in list(self._made) if one[0] == stage][:-KEPT_ERAS]:
                self._made.pop(old, None)
        return found

    def make(self, era: int) -> None:
        """Those of all stages, so that they are there when their ends are wanted."""
        for stage in range(self._run.settings.model.num_stages):
            self.of(stage, era)

    def end(self, stage: int, era: int) -> bytes:
        """What the genesis of a stage commits to."""
        return self.of(stage, era).end


class HostBeacon:
    """Tells the host's values, and draws by them itself."""

    def __init__(self, chains: HostChains, followed: Mapping[int, FollowedStage]) -> None:
        """`followed`: the stages whose certified past is known here; of what is not, nothing is told."""
        self._chains = chains
        self._followed = followed

    def serve(self, transport: Transport) -> None:
        transport.serve(BEACON, self._on_beacon, max_body_bytes=0)

    def said(self, stage: int) -> HostWord:
        """The word on a stage that is followed: on every version whose round is certified, and on no other."""
        chain = self._followed[stage].chain
        own = self._chains.of(stage, chain.era)
        return HostWord(int(chain.version), own.reveal(int(chain.version) - 1))

    def of(self, roster: Roster) -> Beacon:
        """Of the certified roster's round. Raises TransientError if it is not over here."""
        return Beacon.of(roster, self.said(int(roster.stage)))

    async def _on_beacon(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("beacon request", request.meta)
        stage, lineage = fields.integer("stage", high=1 << 16), fields.octets("lineage", length=32)
        fields.done()
        followed = self._followed.get(stage)
        if followed is None or followed.chain.lineage != lineage:
            raise TransientError(f"stage {stage} has another beginning here")
        return Message({"said": self.said(stage).to_value()})
