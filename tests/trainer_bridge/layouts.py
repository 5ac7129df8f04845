"""Manifests by hand."""

from __future__ import annotations

import math

from rollout.types import Manifest, ParamSlice
from trainer_bridge.plan import torch_dtype


def piece(name: str, offset: int, shape: tuple[int, ...], dtype: str = "float32", **changes: object) -> ParamSlice:
    fields = {"global_shape": shape, "start": (0,) * len(shape), "index_base": 0, **changes}
    return ParamSlice(name=name, offset=offset, shape=shape, dtype=dtype, **fields)  # type: ignore[arg-type]


def manifest(*slices: ParamSlice, nbytes: int | None = None, aliases: dict[str, str] | None = None) -> Manifest:
    end = max(p.offset + math.prod(p.shape) * torch_dtype(p.dtype).itemsize for p in slices)
    return Manifest(nbytes=nbytes or end, slices=slices, aliases=aliases or {}, modules={}, layout_hash="layout")
