"""Continuous batching: requests in, steps, samples out."""

from rollout.serving.scheduler import for_each
from rollout.serving.tiers import Preemption

__all__ = ["Preemption", "for_each"]
