"""The inputs of attention: a batch in numbers, its plan in tensors, a layer's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

_NO_WINDOW = 2**31 - 1  # longer than any request


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Describes in plain numbers what one forward computes.

    rows: each request's row of req_to_token. q_lens: its query tokens in this forward, the last
    ones of kv_lens, its tokens in the cache. num_decode: how many leading requests have exactly one
    query token and take the decode path.
    """

    rows: Sequence[int]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_decode: int

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.q_lens) == len(self.kv_lens) >= self.num_decode >= 0
        assert all(0 < q <= kv for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        assert all(q == 1 for q in self.q_lens[: self.num_decode])


@dataclass(frozen=True, kw_only=True)
class DecodeBucket:
    """Decode requests that see similarly much. tokens: int64 [b] query rows. slots: int64 [b, L],
    what each sees, padded with its first one. padding: bool [b, 1, L], True past that.
    """

    tokens: Tensor
    slots: Tensor
    padding: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """One prefill chunk: query rows [start, start + n). slots: int64 [L], what any of them sees.
    hidden: bool [n, L], what each of them does not.
    """

    start: int
    slots: Tensor
    hidden: Tensor


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    buckets: tuple[DecodeBucket, ...]
    segments: tuple[PrefillSegment, ...]


@dataclass(frozen=True, kw_only=True)
class TritonPlan:
    """req_to_token: int32 [rows, max_context_len]. meta: int32 [4, requests] on the device: row of
    req_to_token, first query token, tokens cached, query tokens; decode requests first. kv_lens:
    the tokens cached on the host, too.
    window, mapping: see `plan_attention`.

    Decode takes its lengths from the device only: a caller may build a plan over static tensors,
    num_prefill and max_q_len 0, and refill them between replays of a CUDA graph. A padding request
    has one token, in any valid row.
    """

    req_to_token: Tensor
    meta: Tensor
    num_decode: int
    num_prefill: int
    max_q_len: int
    kv_lens: tuple[int, ...] = ()
    window: int | None = None
    mapping: Tensor | None = None

    @property
    def reach(self) -> int:
        """Keys that a query sees at most."""
        return self.window or _NO_WINDOW

    @cached_property
    def gathered(self) -> tuple[Tensor, TritonPlan]:
        """The slots of all requests' tokens, int64 [sum(kv_lens)], and the plan over a copy of
        their rows alone.
        """
        assert len(self.kv_lens) == self.meta.shape[1], (
            "a plan without lengths on the host can't be gathered"
        )
        device, total = self.meta.device, sum(self.kv_lens)
        lens = self.meta[2].long()
        starts = lens.cumsum(0) - lens
        request = torch.repeat_interleave(lens, output_size=total)
        slots = self.req_to_token[
            self.meta[0][request].long(), torch.arange(total, device=device) - starts[request]
        ]
        table = (starts[:, None] + torch.arange(max(self.kv_lens), device=device)).int()
        numbers = torch.arange(len(lens), device=device, dtype=torch.int32)
        meta = torch.cat([numbers[None], self.meta[1:]])
        slots = slots.long() if self.mapping is None else self.mapping[slots]
        return slots, replace(self, req_to_token=table, meta=meta, mapping=None)


AttentionPlan = TorchPlan | TritonPlan


class KVReader(Protocol):
    """One layer's keys and values, however they are stored, as attention reads them."""

    @property
    def value_dim(self) -> int: ...

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 keys [n, Hkv, D] and values [n, Hkv, Dv] in slots int64 [n]."""

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        """Tensors that a kernel can read, and the plan over them."""


@dataclass(frozen=True, kw_only=True)
class StoredKV:
    """A reader of plain tensors, and what kernels read: k [S, Hkv, D] and v [S, Hkv, Dv] of one
    dtype.

    scales: fp32 [2] on the device, what kernels multiply k and v by; only they read fp8.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k.index_select(0, slots).float(), self.v.index_select(0, slots).float()

    def for_kernels(self, plan: TritonPlan) -> tuple[StoredKV, TritonPlan]:
        return self, plan
