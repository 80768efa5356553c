"""Peers that misbehave, for tests and demonstrations: only a developer's explicit flag makes one.

Their strengths are fixed in `strengths.py`; their names are in `swarm.attacks`.
"""

from peer.adversary.hooks import HONEST, Adversary, At
from peer.adversary.kinds import adversary_of, parse

__all__ = ["HONEST", "Adversary", "At", "adversary_of", "parse"]
