"""What a peer at a stage is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from peer.audit.beside import Beside
from peer.audit.contributions import ContributionAudits
from peer.audit.inquiry import Inquiry
from peer.pipeline.screens import Screens
from peer.pipeline.stage_pass import StagePass
from peer.round.driver import RoundDriver
from peer.round.mail.mail import RoundMail
from peer.round.part_exchange import PartExchange
from peer.round.stage_steps import StageSteps
from peer.state.replica import StageReplica
from swarm.core.settings import RunSettings
from swarm.identity.key import Identity


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The classes of a peer's parts at a stage; whoever makes a daemon may give others, which keep their promises or
    do not."""

    stage_pass: Callable[[RunSettings, str, Identity, StageReplica], StagePass] = StagePass
    """What it makes of microbatches."""
    part_exchange: Callable[[StageSteps, RoundMail, Screens], PartExchange] = PartExchange
    """What it contributes to a round, reduces and sends on."""
    round_driver: Callable[..., RoundDriver] = RoundDriver
    """What it does in a round; called as `RoundDriver` is."""
    contribution_audits: Callable[[Inquiry, Beside], ContributionAudits] = ContributionAudits
    """What it thinks of others' contributions."""
