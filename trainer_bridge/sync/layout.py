"""Parameters where a rollout keeps them: what must agree for an engine to serve the trainer's own
pages.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from memsaver.common.strided import row_major
from rollout.types import Manifest, ParamSlice
from trainer_bridge.errors import listed


def byte_offsets(layout: Manifest, params: Mapping[str, Tensor]) -> dict[str, int]:
    """Tells where the layout has each parameter, by the trainer's name: bytes from the tag's start.

    A ValueError lists what does not agree: names, whole shapes, dtypes, parts instead of wholes.
    Tied parameters are looked up by the name that the layout stores. Tensors may be on any device,
    meta too.
    """
    stored = {layout.aliases.get(name, name): name for name in params}
    count = Counter(piece.name for piece in layout.slices)
    problems = [
        f"{name} is not in the rollout's layout" for name in sorted(stored.keys() - count.keys())
    ]
    problems += [f"{name} is not in the trainer" for name in sorted(count.keys() - stored.keys())]
    if layout.zeros:
        problems.append("the rollout's layout has padding, as of one rank of several")
    offsets = {}
    for piece in layout.slices:
        if (name := stored.get(piece.name)) is None:
            continue
        in_parts = "the rollout has it in parts"
        problem = in_parts if count[piece.name] > 1 else _misfit(piece, params[name])
        if problem is not None:
            problems.append(f"{piece.name}: {problem}")
        offsets[name] = piece.offset
    if problems:
        rule = "the trainer's parameters cannot lie as the rollout's do"
        raise ValueError(f"{rule}: {listed(problems)}; leave layout away, and sync by copies")
    return offsets


def parts(layout: Manifest, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, int]]:
    """Makes what `memsaver.common.digest.Digest` takes: parameters, numbers of first elements."""
    numbers = {piece.name: piece.index_base for piece in layout.slices}
    return [(tensor, numbers[layout.aliases.get(name, name)]) for name, tensor in tensors.items()]


def _misfit(piece: ParamSlice, param: Tensor) -> str | None:
    shape = tuple(param.shape)
    if piece.global_shape != shape:
        return f"shape {shape} in the trainer, {piece.global_shape} in the rollout"
    if piece.shape != shape:
        return f"the rollout has a part {piece.shape} of {shape}"
    if piece.strides is not None and piece.strides != row_major(shape):
        return "its elements are not adjacent in the rollout"
    if (dtype := getattr(torch, piece.dtype)) != param.dtype:
        return f"{param.dtype} in the trainer, {dtype} in the rollout"
    return None
