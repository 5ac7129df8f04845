"""Continuous batching: requests in, steps, samples out."""

from rollout.serving.scheduler import for_each

__all__ = ["for_each"]
