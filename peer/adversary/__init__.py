"""Peers that misbehave, for tests and demonstrations: only a developer's explicit word makes one.

Their strengths are fixed in `strengths.py`; their names are in `swarm.attacks`.
"""
