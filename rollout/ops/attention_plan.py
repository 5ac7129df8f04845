"""The inputs of attention: a batch in numbers, its plan in tensors, a layer's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from memsaver.system.devices import Impl, use_triton

MAX_BUCKET_TOKENS = 1 << 15  # padded tokens gathered at once in decode
_MIN_BUCKET_LEN = 64  # below this, padding costs less than another bucket
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


def plan_attention(
    shape: BatchShape,
    req_to_token: Tensor,
    impl: Impl = "auto",
    window: int | None = None,
    mapping: Tensor | None = None,
) -> AttentionPlan:
    """Index tensors of one forward. req_to_token: int32 [rows, max_context_len]. impl: "auto",
    "torch" or "triton".

    window: how many keys a query sees, None: all before it. mapping: int64 [slots], the cache's
    slot of each slot that req_to_token names, None: the same.
    """
    if not use_triton(impl, req_to_token.device):
        return plan_torch(shape, req_to_token, window, mapping)
    starts = list(accumulate(shape.q_lens, initial=0))[:-1]
    device = req_to_token.device
    meta = torch.tensor(
        [list(shape.rows), starts, list(shape.kv_lens), list(shape.q_lens)],
        dtype=torch.int32,
        pin_memory=device.type == "cuda",  # else the copy would wait for the kernels under way
    )
    return TritonPlan(
        req_to_token=req_to_token,
        meta=meta.to(device, non_blocking=True),
        num_decode=shape.num_decode,
        num_prefill=len(shape.rows) - shape.num_decode,
        max_q_len=max(shape.q_lens[shape.num_decode :], default=0),
        kv_lens=tuple(shape.kv_lens),
        window=window,
        mapping=mapping,
    )


def plan_decode(rows: Tensor, positions: Tensor, req_to_token: Tensor) -> TritonPlan:
    """Triton's plan of a decode-only forward, by launches alone, so that a CUDA graph can hold
    them.

    rows, positions: integers [B] on the device, a request's row of req_to_token and the position of
    its query token. Without window and mapping: `dataclasses.replace` gives a plan those.
    """
    count = len(rows)
    meta = torch.empty((4, count), dtype=torch.int32, device=req_to_token.device)
    meta[0] = rows
    torch.arange(count, out=meta[1])
    torch.add(positions, 1, out=meta[2])
    meta[3] = 1
    return TritonPlan(
        req_to_token=req_to_token, meta=meta, num_decode=count, num_prefill=0, max_q_len=0
    )


def plan_torch(
    shape: BatchShape,
    req_to_token: Tensor,
    window: int | None = None,
    mapping: Tensor | None = None,
) -> TorchPlan:
    device = req_to_token.device
    seen = [min(kv_len, window or kv_len) for kv_len in shape.kv_lens[: shape.num_decode]]
    buckets = tuple(
        _plan_bucket(shape, members, seen, req_to_token, mapping)
        for members in _bucket_members(seen)
    )
    segments = []
    start = shape.num_decode
    for row, q_len, kv_len in list(zip(shape.rows, shape.q_lens, shape.kv_lens, strict=True))[
        shape.num_decode :
    ]:
        first = max(0, kv_len - q_len + 1 - window) if window else 0
        positions = torch.arange(first, kv_len, device=device)
        queries = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
        hidden = positions > queries
        if window:
            hidden |= positions <= queries - window
        slots = _mapped(req_to_token[row, first:kv_len].long(), mapping)
        segments.append(PrefillSegment(start=start, slots=slots, hidden=hidden))
        start += q_len
    return TorchPlan(buckets=buckets, segments=tuple(segments))


def _mapped(slots: Tensor, mapping: Tensor | None) -> Tensor:
    return slots if mapping is None else mapping[slots]


def _bucket_members(seen: Sequence[int]) -> list[list[int]]:
    """Decode requests by the keys they see, so that padding at most doubles the work and no gather
    is huge.
    """
    buckets: list[list[int]] = []
    for i in sorted(range(len(seen)), key=lambda i: seen[i]):
        length = seen[i]
        if buckets:
            shortest = max(seen[buckets[-1][0]], _MIN_BUCKET_LEN)
            if length <= 2 * shortest and length * (len(buckets[-1]) + 1) <= MAX_BUCKET_TOKENS:
                buckets[-1].append(i)
                continue
        buckets.append([i])
    return buckets


def _plan_bucket(
    shape: BatchShape,
    members: list[int],
    seen: Sequence[int],
    req_to_token: Tensor,
    mapping: Tensor | None,
) -> DecodeBucket:
    device = req_to_token.device
    rows, counts, ends = torch.tensor(
        [
            [shape.rows[i] for i in members],
            [seen[i] for i in members],
            [shape.kv_lens[i] for i in members],
        ],
        device=device,
    )[:, :, None]
    nth = torch.arange(max(seen[i] for i in members), device=device)
    padding = nth >= counts
    positions = ends - counts + nth.where(~padding, 0)
    slots = _mapped(req_to_token[rows, positions].long(), mapping)
    return DecodeBucket(
        tokens=torch.tensor(members, device=device), slots=slots, padding=padding.unsqueeze(1)
    )
