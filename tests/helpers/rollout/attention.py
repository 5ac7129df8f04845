"""Paged attention over plain tensors, as a layer's `LayerKV.attend` computes it over a pool."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from memsaver.system.devices import use_triton
from rollout.model.mixers.base import AttentionPlan
from rollout.ops.torch_attention import (
    BatchShape,
    StoredKV,
    TorchPlan,
    decode_bucket,
    plan_torch,
    torch_attention,
)
from rollout.ops.triton_attention import plan_triton, triton_attention


def plan_attention(
    shape: BatchShape, req_to_token: Tensor, impl: Any = "auto", *view: Any
) -> AttentionPlan:
    """Plan attention with one implementation; `view` is a window and a mapping."""
    plan = plan_triton if use_triton(impl, req_to_token.device) else plan_torch
    return plan(shape, req_to_token, *view)


def paged_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Compute attention of q [T, Hq, D] over k [S, Hkv, D] and v [S, Hkv, Dv]."""
    stored = StoredKV(k=k, v=v)
    out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
    if isinstance(plan, TorchPlan):
        rows = stored.rows
        torch_attention(q, plan, scale, out, rows, partial(decode_bucket, rows))
    else:
        triton_attention(q, stored, plan, scale, out)
    return out
