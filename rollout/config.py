"""Configuration of an engine, validated on construction."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kvcache import KVCacheDtype, kv_dtype
from kvcache.config import check_counts, check_option
from kvcache.tiers import HostCacheConfig, Layout, WritePolicy
from memsaver.ops.layout import round_up
from memsaver.system.devices import Impl
from memsaver.types import check_choice

HeadChannels = tuple[tuple[int, ...], ...]  # [KV head][heavy_channel_num]


@dataclass(frozen=True, kw_only=True)
class DoubleSparsity:
    """Sparse decode, which scores cached tokens by a few key channels and attends to the best ones.

    Attributes:
        heavy_channel_num: Number of key channels that are scored, per KV head.
        heavy_token_num: Number of tokens that a query head attends to.
        recent_token_num: Number of most recent tokens that are always attended to; a part of
            `heavy_token_num`.
        channels: The scored channels, [layer][KV head]; None scores the first channels of every
            head. `heavy_channels` chooses better ones from the keys of a few prompts.
    """

    heavy_channel_num: int
    heavy_token_num: int
    recent_token_num: int = 1
    channels: tuple[HeadChannels, ...] | None = None

    def __post_init__(self) -> None:
        check_counts(self, "heavy_channel_num", "heavy_token_num", "recent_token_num")
        rule = f"exceeds heavy_token_num={self.heavy_token_num}, which includes these tokens"
        few = self.recent_token_num <= self.heavy_token_num
        check_option(self, "recent_token_num", few, rule)

    def check(self, num_layers: int, kv_heads: int, head_dim: int) -> None:
        """Check that the channels fit a model of this shape.

        Args:
            num_layers: Layers of the model.
            kv_heads: KV heads of a layer.
            head_dim: Channels of a key.

        Raises:
            ValueError: The channels do not fit.
        """
        rule = f"exceeds the {head_dim} channels of keys; lower it"
        check_option(self, "heavy_channel_num", self.heavy_channel_num <= head_dim, rule)
        if self.channels is None:
            return
        right = [len(self.channels) == num_layers]
        for layer in self.channels:
            right += [len(set(head) & set(range(head_dim))) == len(head) for head in layer]
            right += [len(layer) == kv_heads, {*map(len, layer)} == {self.heavy_channel_num}]
        if not all(right):
            raise ValueError(
                f"double_sparsity.channels must name heavy_channel_num={self.heavy_channel_num} "
                f"different ones of channels 0..{head_dim - 1} for each of {kv_heads} KV heads in "
                f"each of {num_layers} layers; got {self.channels}"
            )

    def of_layer(self, layer: int, kv_heads: int) -> HeadChannels:
        """Return the scored channels of each KV head of a layer.

        Args:
            layer: Index of the layer.
            kv_heads: KV heads of the layer.

        Returns:
            The channels, [KV head][heavy_channel_num].
        """
        first = tuple(range(self.heavy_channel_num))
        return self.channels[layer] if self.channels else (first,) * kv_heads


@dataclass(frozen=True, kw_only=True)
class AdapterSlots:
    """Room for low-rank adapters, which an engine serves beside its base without merging them.

    Attributes:
        slots: Number of adapters that are there together. A new version of an adapter takes a slot
            of its own while requests of the old one run.
        rank: Largest rank of an adapter.
        target_modules: Linear layers that adapters may have, by the last part of their names, such
            as "q_proj"; empty: all of attention and dense MLPs.
    """

    slots: int = 2
    rank: int = 16
    target_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_counts(self, "slots", "rank")
        object.__setattr__(self, "target_modules", tuple(self.target_modules))


Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, kw_only=True)
class KVTiers:
    """Host memory and disk to which cached pages move when the device pool is full.

    Attributes:
        host_ratio: Host tokens per token of the device pool. Give either this or `host_bytes`.
        host_bytes: Maximum bytes of host memory.
        layout: Layout of the host pages, see `HostCacheConfig`.
        write_policy: When a page is copied to the host, see `kvcache.tiers`.
        disk_directory: Directory for pages that leave the host; None: no disk. Only one engine may
            use it: files that another engine left there are deleted.
        disk_bytes: Maximum bytes of the files; given together with `disk_directory`.
        preemption: How a sample that had to make room returns: by computing its tokens again
            ("recompute"), or by copying its pages to the host and back ("swap").
        keep_asleep: Copy cached pages to the host before a sleep of the KV cache, and find them
            again under the same weights. False: a sleep forgets them.
    """

    host_ratio: float | None = None
    host_bytes: int | None = None
    layout: Layout = "layer_first"
    write_policy: WritePolicy = "write_through"
    disk_directory: str | Path | None = None
    disk_bytes: int | None = None
    preemption: Preemption = "swap"
    keep_asleep: bool = True

    def __post_init__(self) -> None:
        _ = self.host  # construction validates host_ratio, host_bytes and layout
        check_choice("write_policy", self.write_policy, WritePolicy)
        check_choice("preemption", self.preemption, Preemption)
        if (self.disk_directory is None) != (self.disk_bytes is None):
            raise ValueError(
                f"give disk_directory and disk_bytes together or neither, got "
                f"{self.disk_directory} and {self.disk_bytes}"
            )

    @property
    def host(self) -> HostCacheConfig:
        """Return the configuration of the host tier."""
        return HostCacheConfig(
            ratio=self.host_ratio, size_bytes=self.host_bytes, layout=self.layout
        )


def why_one_size(
    pages_tell_all: bool, tensor_parallel_size: int, tiers: bool, double_sparsity: bool = False
) -> str | None:
    """Return why a KV pool cannot grow while the engine generates; None if it can.

    `pages_tell_all` says whether every layer has full or latent attention (`KVLayout`).
    """
    reasons = {
        f"tensor_parallel_size={tensor_parallel_size}: ranks must decide alike": (
            tensor_parallel_size > 1
        ),
        "cached pages go to host tiers": tiers,
        "double sparsity labels every token": double_sparsity,
        "the model has sliding windows or linear layers": not pages_tell_all,
    }
    return next((why for why, applies in reasons.items() if applies), None)


def first_tokens(max_context_len: int, kv_tokens: int, page_size: int) -> int:
    """Return the tokens of an elastic pool after `wake_up(partly=True)`: one longest sample."""
    return round_up(min(max_context_len, kv_tokens), page_size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one engine.

    Attributes:
        kv_tokens: Tokens in the KV pool of one rank; a multiple of `page_size`. None: the engine
            sizes the pool when it is built (`Engine`).
        window_tokens: Tokens in the pool of the sliding layers, in a model that mixes them with
            full layers; a multiple of `page_size`. None: enough for `max_running` windows and
            `max_prefill_tokens` more, at most `kv_tokens`.
        page_size: Tokens per page.
        max_running: Samples in one step.
        max_prefill_tokens: Prompt tokens computed in one step; longer prompts are split.
        mixed_prefill_tokens: The same in a step in which samples also decode. A smaller number
            keeps the time between their tokens short while prompts come, for less throughput. None:
            `max_prefill_tokens`.
        max_context_len: Maximum tokens of prompt and answer together. None: the model's limit,
            at most `kv_tokens`.
        attention: "torch" (reference), "triton", or "auto": Triton on a GPU, torch elsewhere.
        kv_cache_dtype: Stored dtype of the pool: "auto" (the model's dtype), "fp8_e4m3", "fp8_e5m2"
            or "fp4_e2m1". Another name is accepted only if it is the model's dtype.
        double_sparsity: Decode over the heaviest tokens only. It needs torch attention, which
            "auto" then selects.
        cuda_graphs: Run steps as CUDA graphs, on a GPU with Triton attention.
        graph_batch_sizes: Batch sizes of decode steps that are captured. Smaller batches are padded
            to the next size, larger ones run without a graph. None: a ladder of sizes up to
            `max_running`.
        graph_prefill_tokens: Steps with at most so many prompt tokens are captured, too; 0: none.
            Their graphs take the memory of one layer's activations of such a step. Ranks that share
            a model run these steps without a graph.
        prefix_cache: Reuse the pages of earlier prompts with the same beginning. Always off in
            models with sliding layers and with double sparsity.
        prefix_states: Number of prompts whose states the prefix cache keeps, in a model with linear
            layers. Each occupies a state slot, as a running sample does; 0 turns the cache off in
            such a model.
        elastic: `wake_up(partly=True)` starts with a pool for one sample of `max_context_len`.
            Between steps the pool grows into memory that other tags free, up to `kv_tokens` and to
            the tokens that unfinished samples can use; after `shrink()` it gives memory back as
            samples end. Where `why_one_size` names a reason against it, the pool wakes up whole
            and the reason is logged.
        return_routed_experts: Return each token's experts in `Completion.routed_experts`; for
            mixtures of experts.
        fp32_router: Compute the routers' logits, and the weights of experts' outputs, in fp32 for
            any dtype of the model.
        exact: Refuse whatever would give log-probabilities other bits than a trainer with
            `TrainerConfig.exact`: a quantized cache, double sparsity, models without plain
            attention, several ranks of a mixture of experts, or fp32 on a GPU. At start, the
            library's products are compared with their definition, and replaced by Triton's where
            they differ; where Triton's bits depend on the batch, too, True refuses and "warn"
            warns. More than two ranks add their partial sums in the order of the ranks.
        tiers: Host memory and disk for cached pages and preempted samples; None: neither.
        adapters: Room for adapters, for requests with `SamplingParams.adapter`; None: none.
        sample_all_ids: Sample any row of the output layer. By default, ids beyond those of the
            tokenizer, which have no text, are never sampled.
        seed: Seed from which requests without a seed receive theirs, in the order of requests.
        tensor_parallel_size: Number of ranks that share the model. Each has an engine with this
            configuration and `Engine(..., group=)`. Excludes double sparsity and FP4.
        expert_parallel: Number of parts into which each layer's experts are divided; a divisor of
            `tensor_parallel_size`. The ranks of one part divide the inner channels of its experts.
            1: every rank has inner channels of every expert.
    """

    kv_tokens: int | None = None
    window_tokens: int | None = None
    page_size: int = 16
    max_running: int = 64
    max_prefill_tokens: int = 512
    mixed_prefill_tokens: int | None = None
    max_context_len: int | None = None
    attention: Impl = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    double_sparsity: DoubleSparsity | None = None
    cuda_graphs: bool = True
    graph_batch_sizes: tuple[int, ...] | None = None
    graph_prefill_tokens: int = 4096
    prefix_cache: bool = True
    prefix_states: int = 16
    elastic: bool = False
    return_routed_experts: bool = False
    fp32_router: bool = False
    exact: bool | Literal["warn"] = False
    tiers: KVTiers | None = None
    adapters: AdapterSlots | None = None
    sample_all_ids: bool = False
    seed: int = 0
    tensor_parallel_size: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        counts = ("page_size", "max_running", "max_prefill_tokens")
        check_counts(self, *counts, "tensor_parallel_size", "expert_parallel")
        given = ("kv_tokens", "mixed_prefill_tokens")
        check_counts(self, *(key for key in given if getattr(self, key) is not None))
        for key in ("kv_tokens", "window_tokens"):
            whole = round_up(getattr(self, key) or 0, self.page_size)
            rule = f"is not a multiple of page_size={self.page_size}; use {key}={whole}"
            check_option(self, key, getattr(self, key) in (None, whole), rule)
        window, most = self.window_tokens, self.kv_tokens or math.inf
        rule = f"must be in 1..kv_tokens={self.kv_tokens}"
        check_option(self, "window_tokens", window is None or 0 < window <= most, rule)
        longest = self.max_context_len
        rule = "has no room for a prompt and one token; raise it"
        check_option(self, "max_context_len", longest is None or longest >= 2, rule)
        check_choice("attention", self.attention, Impl)
        kv_dtype(self.kv_cache_dtype, torch.float32)  # raises a ValueError for an unknown name
        check_option(self, "seed", 0 <= self.seed < 2**63, "must be in [0, 2**63)")
        if self.graph_batch_sizes is not None:
            object.__setattr__(self, "graph_batch_sizes", tuple(self.graph_batch_sizes))
            rule = "must be batch sizes of at least 1; use cuda_graphs=False for no graphs"
            least = min(self.graph_batch_sizes, default=0)
            check_option(self, "graph_batch_sizes", least > 0, rule)
        check_counts(self, "prefix_states", "graph_prefill_tokens", least=0)
        self._check_together()

    def _check_together(self) -> None:
        """Raise a ValueError for options that exclude each other."""
        if self.exact:
            rule = "has other bits than an exact trainer; use exact=False"
            check_option(self, "kv_cache_dtype", self.kv_cache_dtype == "auto", rule)
            check_option(self, "double_sparsity", self.double_sparsity is None, rule)
        sparse, fp4 = self.double_sparsity is not None, self.kv_cache_dtype == "fp4_e2m1"
        if sparse:
            rule = "has no double sparsity; use attention='torch' or 'auto'"
            check_option(self, "attention", self.attention != "triton", rule)
            rule = "has no double sparsity; use kv_cache_dtype='auto'"
            check_option(self, "kv_cache_dtype", self.kv_cache_dtype == "auto", rule)
            object.__setattr__(self, "attention", "torch")
        rule = "has no place for tiers, a part of the prefix cache; use tiers=None"
        check_option(self, "prefix_cache", self.prefix_cache or self.tiers is None, rule)
        ranks = self.tensor_parallel_size
        rule = f"must divide tensor_parallel_size={ranks}"
        check_option(self, "expert_parallel", ranks % self.expert_parallel == 0, rule)
        rule = "takes neither double_sparsity nor kv_cache_dtype='fp4_e2m1'; leave these out"
        check_option(self, "tensor_parallel_size", ranks == 1 or not (sparse or fp4), rule)
        disk = self.tiers is not None and self.tiers.disk_directory is not None
        rule = "excludes tiers with disk_directory: ranks must decide alike, and disks may differ"
        check_option(self, "tensor_parallel_size", ranks == 1 or not disk, rule)

    @property
    def captured_tokens(self) -> int:
        """Return the tokens of the largest captured step with prompts; 0: none is captured."""
        prompts = min(self.graph_prefill_tokens, self.max_prefill_tokens)
        captured = self.cuda_graphs and self.tensor_parallel_size == 1 and prompts
        return self.max_running + prompts if captured else 0

    @property
    def state_slots(self) -> int:
        """Return the number of state slots, for linear layers, without the padding slot."""
        return self.max_running + (self.prefix_states if self.prefix_cache else 0)
