"""Errors of the rollout engine that are not a user's mistake (those are ValueError)."""


class WeightUpdateError(RuntimeError):
    """A weight update failed, or was called out of order; `unavailable_reason()` says whether the engine can serve."""
