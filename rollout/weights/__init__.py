"""The engine's weights on their tag, and how they are replaced."""

from rollout.weights.store import arena_nbytes

__all__ = ["arena_nbytes"]
