"""Paged attention over plain tensors, as a layer's `LayerKV.attend` computes it over a pool."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

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


def round_products_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter compute products in fp64, rounded to fp32.

    numpy's fp32 products of few rows have other bits than those of many rows. Rounded from fp64,
    they have the same, as on tensor cores.
    """

    def create_dot(_: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        summed = product.astype(np.float32) + d.data
        return interpreter.TensorHandle(summed, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
