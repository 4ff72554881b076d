"""Scorers that see the text of outputs before anybody else does: what they are asked and answer."""

from ridgeline.engine.guard.scorer import Decision, End, Hold, Release, Retract, Scorer

__all__ = ["Decision", "End", "Hold", "Release", "Retract", "Scorer"]
