"""A whole swarm in one process, without messages and time: what its peers decide, compute, sign and audit is real.

outcome = SimulatedSwarm(TinyRun(), attacks={(1, 2): "sign_flip@10"}, seed=0).run(150)
"""

from peer.sim.audits import Shown
from peer.sim.justice import Banned
from peer.sim.swarm import Outcome, SimulatedSwarm
from peer.sim.tiny_run import TinyRun

__all__ = ["Banned", "Outcome", "Shown", "SimulatedSwarm", "TinyRun"]
