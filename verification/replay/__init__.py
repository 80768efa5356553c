"""Recomputing what a stage's peers must have computed, from certified facts and the bytes they committed to."""

from verification.replay.stage_replay import Replayed, StageReplay

__all__ = ["Replayed", "StageReplay"]
