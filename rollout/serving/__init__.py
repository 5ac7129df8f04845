"""Continuous batching: requests in, steps, samples out."""

from rollout.serving.intake import for_each
from rollout.serving.preemption import Preemption

__all__ = ["Preemption", "for_each"]
