"""The size of an engine's KV pool: the tokens for which a share of a device has room.

The share of a rank holds its weights, its KV cache, the temporaries of a step, CUDA graphs, and
cuBLAS's workspaces. It does not hold the contexts and kernels of processes, NCCL's buffers, and the
keys that torch attention gathers; the rest of the device is for them.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from kvcache import KVLayout, layout
from kvcache.config import FP4_DTYPE
from memsaver.memory import empty_torch_cache
from memsaver.ops.layout import round_up
from rollout.config import EngineConfig
from rollout.model.adapter_params import adapter_groups
from rollout.model.decoder import ModelConfig, rank_groups, rank_layout
from rollout.ops.attention_kernels import split_count
from rollout.parallel import STAGING_BYTES, TensorParallel
from rollout.scheduling.kv_cache import window_tokens
from rollout.weights.store import arena_nbytes

CPU_TOKENS = 4096  # of a pool on a CPU, whose memory other programs use, too
WITH_SAVER, ALONE = 0.9, 0.4  # shares of the free memory, see `Engine.from_pretrained`
_WORKSPACE = 32 << 20  # of cuBLAS on Hopper; the graphs have one, and the other steps one
_TABLES = 4 << 20  # tables and counters of an idle engine, as measured
_SMALL, _SEGMENT = 2 << 20, 20 << 20  # segments of torch for tensors below 1 MiB, and above
# Bytes of a filtered logit, measured at the peak of `keep_top`. Below 128 rows, torch sorts all
# rows at once, which takes more than sorting each row.
_FEW_ROWS, _FILTERED, _FILTERED_OF_FEW = 127, 54, 66


class PoolSizeError(ValueError):
    """A share of a device that has no room for a pool that serves one request.

    Attributes:
        share: The share.
        why: What takes which bytes.
        least: Smallest share that suffices, in hundredths; above 1 if the device is too small.
        tokens: Tokens of the largest pool that fits; 0 if not even a page fits.
    """

    def __init__(self, share: float, why: str, least: float, tokens: int) -> None:
        super().__init__(share, why, least, tokens)  # all arguments, so that it can be unpickled
        self.share, self.why, self.least, self.tokens = share, why, least, tokens

    def __str__(self) -> str:
        remedy = "raise tensor_parallel_size" if self.least > 1 else f"use gpu_share={self.least}"
        lower = "lower max_context_len, max_running or max_prefill_tokens"
        return f"gpu_share={self.share:.3g}: {self.why}; {remedy}, or {lower}"


@dataclass(frozen=True)
class RankBytes:
    """The bytes that one rank of an engine takes, of rank 0, which has the most weights.

    `config.kv_tokens` is not read.
    """

    model: ModelConfig
    config: EngineConfig
    dtype: torch.dtype

    _per_logit: ClassVar[int] = 0  # further bytes of each logit

    @cached_property
    def layout(self) -> KVLayout:
        kv_layout = layout(self.model.hf_config, self.config.kv_cache_dtype, self.dtype)
        return rank_layout(kv_layout, self.config.tensor_parallel_size)

    @cached_property
    def weights(self) -> int:
        sizes = self.config.tensor_parallel_size, self.config.expert_parallel
        return arena_nbytes(rank_groups(self.model, 0, *sizes), self.dtype)

    @property
    def adapter_slots(self) -> int:
        """Return the bytes of the slots for adapters."""
        if (adapters := self.config.adapters) is None:
            return 0
        sizes = self.config.tensor_parallel_size, self.config.expert_parallel
        groups = adapter_groups(self.model, adapters, 0, *sizes)
        return adapters.slots * arena_nbytes(groups, self.dtype)

    def kv_cache(self, tokens: int) -> int:
        """Return the bytes of a pool of `tokens` tokens, padding pages and states included."""
        config, page = self.config, self.config.page_size
        stored = len(self.layout.layers("full", "sliding", "mla"))
        row = self.layout.bytes_per_token // stored
        if config.double_sparsity is not None:
            labels = self.layout.rows["k"][0] * config.double_sparsity.heavy_channel_num
            row += labels * self.dtype.itemsize
        window = window_tokens(self.layout, config, tokens)
        rows = stored * (tokens + page)
        if window is not None:
            rows -= len(self.layout.layers("sliding")) * (tokens - window)
        return rows * row + (config.state_slots + 1) * self.layout.state_bytes

    def step(self, *, filters: bool = False) -> int:
        """Return the bytes of the temporaries of a step, which has a prefill and decodes.

        The forward makes a layer's temporaries and leaves logits in the model's dtype. Sampling
        copies them, as several samples begin at the same prompt, and converts only rows with
        filters to fp32. Ranks have their columns, those of all ranks, and joined rows before.

        Args:
            filters: Whether any number of samples may have top-k or top-p.
        """
        config, running = self.config, self.config.max_running
        copies = 2 if config.tensor_parallel_size == 1 else 4
        per_column = running * (self._per_logit + copies * self.dtype.itemsize)
        if filters:
            few = min(running, _FEW_ROWS) * _FILTERED_OF_FEW
            per_column += max(few, running * _FILTERED)
        logits = self.model.vocab_size * per_column
        # Ranks that add in order gather partial sums, and have two sums that are smaller.
        gathered = 2 * STAGING_BYTES if config.exact and config.tensor_parallel_size > 2 else 0
        return max(logits + _SMALL, self._forward(running + config.max_prefill_tokens)) + gathered

    @property
    def idle(self) -> int:
        """Return the bytes of torch's memory in an idle engine."""
        staged = self.config.cuda_graphs and self.config.tensor_parallel_size > 1
        return _TABLES + (STAGING_BYTES if staged else 0)

    @property
    def graphs(self) -> int:
        """Return the bytes of CUDA graphs, without a workspace: results, and segments of a step."""
        running, tokens = self.config.max_running, self.config.captured_tokens
        results = running * self.model.vocab_size + tokens * self.model.hidden_size
        segments = round_up(self._forward(max(running, tokens)), _SEGMENT) + _SMALL
        return results * self.dtype.itemsize + segments if self.config.cuda_graphs else 0

    def _forward(self, rows: int) -> int:
        """Return the bytes of a layer's temporaries, and of the splits of decoding requests."""
        model, config = self.model, self.config
        hidden, size = model.hidden_size, config.tensor_parallel_size
        width = max(width for _, width in self.layout.rows.values())
        heads = max((getattr(mixer, "num_heads", 0) for mixer in model.mixers), default=0) // size
        mlp = max(sum(mlp.widths(hidden, size, config.expert_parallel)) for mlp in model.mlps)
        longest = config.max_context_len or model.max_position_embeddings
        splits = heads * split_count(longest) * (width + 2) * torch.float32.itemsize
        layer = (max(mlp, heads * 2 * width) + 8 * hidden) * self.dtype.itemsize
        return rows * layer + config.max_running * splits

    def taken(self, tokens: int, filters: bool) -> int:
        """Return all bytes of the rank with a pool of `tokens` tokens.

        With `filters`, all samples of a step may have top-k or top-p.
        """
        config = self.config
        fixed = self.weights + self.adapter_slots + self.step(filters=filters)
        fixed += self.graphs + 2 * _WORKSPACE
        longest = config.max_context_len or self.model.max_position_embeddings
        width = max(width for _, width in self.layout.rows.values())
        fixed += (
            (config.max_running + 1 + 2 * width) * longest * 4
        )  # pages of requests, rotary tables
        if self.layout.dtype == FP4_DTYPE:  # A layer's cached rows are read as a dequantized copy.
            rows = sum(heads * width for heads, width in self.layout.rows.values())
            fixed += tokens * rows * self.dtype.itemsize
        return fixed + self.kv_cache(tokens)


def pool_size(
    model: ModelConfig,
    config: EngineConfig,
    total: int,
    share: float,
    dtype: torch.dtype = torch.float32,
    *,
    filters: bool = True,
) -> int:
    """Return the tokens of the largest KV pool with which a rank fits a share of its device.

    Args:
        model: The model's configuration.
        config: Sizes and policies; `kv_tokens` is not read.
        total: Bytes of the device.
        share: Share of the device, in (0, 1], for weights, KV cache, steps and CUDA graphs.
        dtype: Dtype of weights and computation.
        filters: Whether there is room for top-k or top-p in all samples of a step, which takes up
            to 66 bytes for each of their logits.

    Returns:
        A multiple of `page_size`, equal on all ranks.

    Raises:
        PoolSizeError: The pool would not hold one request of `max_context_len`; without it, of the
            model's limit or 4,096 tokens.
        ValueError: The share is not in (0, 1].
    """
    rank, page, budget = RankBytes(model, config, dtype), config.page_size, _bytes(share, total)
    most = range((1 << 31) // page - 1)  # Slots are int32.
    pages = bisect_right(most, budget, key=lambda n: rank.taken(n * page, filters)) - 1
    longest = config.max_context_len or min(model.max_position_embeddings, CPU_TOKENS)
    if pages * page >= longest:
        return pages * page
    fixed, needed = (rank.taken(n, filters) for n in (0, round_up(longest, page)))
    why = f"weights, states and steps take {fixed} bytes of the share's {budget}, "
    why += f"and one request of {longest} tokens takes {needed - fixed}"
    least = math.ceil(needed / total * 100) / 100
    raise PoolSizeError(share, why, least, max(0, pages) * page)


def _bytes(share: float, total: int) -> int:
    if 0 < share <= 1:
        return int(share * total)
    raise ValueError(f"gpu_share={share} must be above 0 and at most 1; use gpu_share=0.9")


def free_share(device: torch.device, part: float) -> float:
    """Return a part of the memory of a GPU that is free now, as a share of all of its memory."""
    empty_torch_cache(device)
    free, total = torch.cuda.mem_get_info(device)
    return part * free / total


def sized(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    gpu_share: float | None,
    filters: bool,
    ranks: TensorParallel,
) -> EngineConfig:
    """Return the configuration with the tokens of the pool, which are equal on all ranks.

    On a GPU, the pool has at most the tokens that `max_running` requests of the longest length can
    fill. Arguments are those of `Engine`.
    """
    if gpu_share is not None and (config.kv_tokens is not None or device.type == "cpu"):
        other = "the engine is on a CPU" if config.kv_tokens is None else "kv_tokens is given, too"
        raise ValueError(f"gpu_share={gpu_share} sizes the pool of a GPU: {other}; leave it out")
    if config.kv_tokens is not None:
        return config
    if device.type == "cpu":
        tokens = round_up(max(CPU_TOKENS, config.max_context_len or 0), config.page_size)
        return replace(config, kv_tokens=tokens)
    total = torch.cuda.mem_get_info(device)[1]
    share = free_share(device, WITH_SAVER) if gpu_share is None else gpu_share
    # The free memory differs from rank to rank.
    agreed = ranks.agree([_bytes(share, total), total], device, "size of the KV pool")
    tokens = pool_size(model, config, agreed[1], agreed[0] / agreed[1], dtype, filters=filters)
    longest = config.max_context_len or model.max_position_embeddings
    most = round_up(config.max_running * longest, config.page_size)
    return replace(config, kv_tokens=min(tokens, most))
