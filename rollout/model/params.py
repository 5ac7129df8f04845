"""Checkpoint parameters and how they lie together in memory."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The box of `shape` at `start` of the whole parameter; this rank stores it at `at`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describes what this rank stores of a parameter of `shape`; what no piece fills is zero."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Param:
    """A checkpoint parameter.

    shape: as this rank stores it. part: where that is not the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    part: Part | None = None

    @property
    def whole(self) -> Part:
        """The whole parameter, and which pieces of it this rank stores."""
        origin = (0,) * len(self.shape)
        return self.part or Part(
            shape=self.shape, pieces=(Piece(start=origin, shape=self.shape, at=origin),)
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters stored without a gap; stacked along the first dimension they are the tensor
    `fused` (None: one).
    """

    params: tuple[Param, ...]
    fused: str | None = None


def one(name: str, *shape: int) -> Group:
    """A parameter by itself."""
    return Group(params=(Param(name=name, shape=shape),))


def stack(fused: str, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Group:
    """(name, shape) of parameters that are multiplied with at once, as `fused`."""
    return Group(params=tuple(Param(name=name, shape=shape) for name, shape in parts), fused=fused)
