"""Names and shapes of a Qwen2.5 checkpoint, and which box of each parameter a rank holds or needs.

A box is (start, shape), both `[dims]`, in elements of the whole parameter.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.common import qwen_config

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Box = tuple[Shape, Shape]

_COLUMNS = ("o_proj.weight", "down_proj.weight")  # split along dimension 1; norms are on every rank; the rest: 0


def qwen_shapes(size: str, **changes: Any) -> Shapes:
    """Names and shapes in the checkpoint's order; 339 at "7b"."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen_config(size, **changes))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def count(shapes: Shapes) -> int:
    """Elements of all parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


# ---------------------------------------------------------------- boxes


def tp_dim(name: str) -> int | None:
    """The dimension that tensor parallel splits; None: every rank holds it whole."""
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(_COLUMNS) else 0


def held_box(name: str, shape: Shape, rank: int, size: int, aligned: bool = False) -> Box:
    """What a trainer rank holds: its part of dimension 0; aligned: along the rollout's slices, and norms along 0."""
    return _part(name, shape, rank, size, (tp_dim(name) or 0) if aligned else 0)


def needed_box(name: str, shape: Shape, rank: int, size: int, needs: str) -> Box:
    """What a rollout rank needs: all of it ("replica"), or a slice of it ("tp")."""
    dim = tp_dim(name)
    return _part(name, shape, rank, size, dim) if needs == "tp" and dim is not None else ((0,) * len(shape), shape)


def _part(name: str, shape: Shape, rank: int, size: int, dim: int) -> Box:
    part = shape[dim] // size
    assert part * size == shape[dim], f"{name} {shape} does not divide by {size}"
    start, lengths = [0] * len(shape), list(shape)
    start[dim], lengths[dim] = rank * part, part
    return tuple(start), tuple(lengths)


def overlap(one: Box, other: Box) -> int:
    """Elements in both."""
    edges = zip(*one, *other, strict=True)
    return math.prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in edges)


def moves(shapes: Shapes, size: int, needs: str, aligned: bool = False) -> tuple[int, int]:
    """(local, linked) elements that the busiest of `size` ranks takes in, one trainer shard and one target a rank."""
    local = linked = 0
    for mine in range(size):
        taken = [
            sum(
                overlap(held_box(name, shape, rank, size, aligned), needed_box(name, shape, mine, size, needs))
                for name, shape in shapes.items()
            )
            for rank in range(size)
        ]
        local = max(local, taken[mine])
        linked = max(linked, sum(taken) - taken[mine])
    return local, linked
