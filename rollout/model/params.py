"""Checkpoint parameters and how they lie together in memory."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Param:
    """A checkpoint parameter."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters stored without a gap; stacked along the first dimension they are the tensor `fused` (None: one)."""

    params: tuple[Param, ...]
    fused: str | None = None


def one(name: str, *shape: int) -> Group:
    """A parameter by itself."""
    return Group(params=(Param(name=name, shape=shape),))


def stack(fused: str, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Group:
    """(name, shape) of parameters that are multiplied with at once, as `fused`."""
    return Group(params=tuple(Param(name=name, shape=shape) for name, shape in parts), fused=fused)
