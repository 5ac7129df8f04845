"""Names and shapes of a Qwen2.5 checkpoint, and which box of each parameter a rank holds or needs. Pure integers.

A box is (start, shape), both `[dims]`, in elements of the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tests.benchmarks.common import QWEN25

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Box = tuple[Shape, Shape]
BoxOf = Callable[[str, Shape], Box]

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 96,
}
_COLUMNS = ("o_proj.weight", "down_proj.weight")  # split along dimension 1; norms are on every rank; the rest: 0


def qwen_shapes(size: str = "7b", layers: int | None = None) -> Shapes:
    """Names and shapes in the checkpoint's order; 339 at "7b". size: a key of QWEN25, or "tiny"."""
    config = TINY if size == "tiny" else QWEN25[size]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"] if layers is None else layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: Shapes = {}
    for name, rows in (("q_proj", hidden), ("k_proj", key_value), ("v_proj", key_value)):
        shapes[f"self_attn.{name}.weight"] = (rows, hidden)
        shapes[f"self_attn.{name}.bias"] = (rows,)
    return {
        **shapes,
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def count(shapes: Shapes) -> int:
    """Elements of all parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


# ---------------------------------------------------------------- boxes


def whole_box(name: str, shape: Shape) -> Box:
    return (0,) * len(shape), shape


def shard_box(shape: Shape, rank: int, size: int, dim: int = 0) -> Box:
    """What Shard(dim) gives `rank`, as torch.chunk splits: all parts but the last ones alike; may be empty."""
    part = -(-shape[dim] // size)
    start = min(rank * part, shape[dim])
    stop = min(start + part, shape[dim])
    return _cut(shape, dim, start, stop)


def tp_dim(name: str) -> int | None:
    """The dimension that tensor parallel splits; None: every rank holds it whole."""
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(_COLUMNS) else 0


def tp_box(name: str, shape: Shape, rank: int, size: int) -> Box:
    """ValueError if the dimension is no multiple of `size`."""
    dim = tp_dim(name)
    if dim is None:
        return whole_box(name, shape)
    if shape[dim] % size:
        raise ValueError(f"{name} {shape}: dimension {dim} is no multiple of {size} ranks")
    part = shape[dim] // size
    return _cut(shape, dim, rank * part, (rank + 1) * part)


def aligned_box(name: str, shape: Shape, rank: int, size: int) -> Box:
    """The shard that a trainer rank holds if shards lie along the rollout's slices; norms along dimension 0."""
    return shard_box(shape, rank, size, tp_dim(name) or 0)


def _cut(shape: Shape, dim: int, start: int, stop: int) -> Box:
    starts = tuple(start if axis == dim else 0 for axis in range(len(shape)))
    return starts, tuple(stop - start if axis == dim else length for axis, length in enumerate(shape))


def overlap(one: Box, other: Box) -> int:
    """Elements in both."""
    edges = zip(*one, *other, strict=True)
    return math.prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in edges)


def flow(shapes: Shapes, held: BoxOf, needed: BoxOf) -> int:
    """Elements that a holder of `held` has for who needs `needed`: with both on one rank, local; else over the link."""
    return sum(overlap(held(name, shape), needed(name, shape)) for name, shape in shapes.items())


def moves(shapes: Shapes, size: int, needs: str, aligned: bool = False) -> tuple[int, int]:
    """(local, linked) elements that the busiest of `size` ranks takes in, one trainer shard and one target a rank.

    needs: "replica" (the whole model on each rank) or "tp" (a slice). aligned: see `aligned_box`; else Shard(0).
    """
    local = linked = 0
    for mine in range(size):

        def needed(name: str, shape: Shape, rank: int = mine) -> Box:
            return whole_box(name, shape) if needs == "replica" else tp_box(name, shape, rank, size)

        flows = [flow(shapes, _holder(aligned, rank, size), needed) for rank in range(size)]
        local = max(local, flows[mine])
        linked = max(linked, sum(flows) - flows[mine])
    return local, linked


def _holder(aligned: bool, rank: int, size: int) -> BoxOf:
    if aligned:
        return lambda name, shape: aligned_box(name, shape, rank, size)
    return lambda name, shape: shard_box(shape, rank, size)
