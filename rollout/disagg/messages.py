"""Defines the messages between prefill and decode ranks, plain data, and what they compare."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.pools import MHATokenToKVPool
from kvcache.staging import Watermark, pool_layers
from memsaver import Ticket
from memsaver.common.plain import Plain
from rollout.model.decoder import ModelConfig
from rollout.serving.kv_setup import Cache
from rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Names a rank. geometry: of the model and of what the pool keeps; must be equal on both sides.

    ring_bytes, ticket: of a decode rank's ring, and what a writer needs to reach it."""

    tp_size: int
    tp_rank: int
    geometry: str
    ring_bytes: int = 0
    ticket: Any = None


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bytes of a decode rank's ring for tokens [first, first + tokens) of a prompt."""

    first: int
    tokens: int
    offset: int
    nbytes: int
    round: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, kw_only=True)
class Ask:
    """decode -> prefill: compute this prompt, into the ranges, and its samples' first tokens.

    Numbers rise by one. indices: of the samples that share the prompt; they and the seed decide.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    indices: tuple[int, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class First:
    """The first token of each sample, and the version of the weights that computed it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass(frozen=True, kw_only=True)
class Filled:
    """prefill -> decode: this writer's part of the `nth` range is written, or on its way."""

    number: int
    nth: int
    first: First


@dataclass(frozen=True, kw_only=True)
class Refused:
    """prefill -> decode: nothing will come, and why."""

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Freed:
    """decode -> prefill: the ring's watermark."""

    watermark: Watermark


@dataclass(frozen=True, kw_only=True)
class Closed:
    """decode -> prefill: no more requests."""


Message = Hello | Ask | Filled | Refused | Freed | Closed
PLAIN = Plain(
    Hello, Ask, Range, First, Filled, Refused, Freed, Closed, SamplingParams, Watermark, Ticket
)
"""How they travel."""


def staged_layers(cache: Cache) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, to be staged; ValueError for all but full attention."""
    kept = cache.layout
    if (
        not isinstance(cache.pool, MHATokenToKVPool)
        or kept.sliding_window is not None
        or cache.sparsity is not None
    ):
        raise ValueError(
            "a prefill/decode split needs full attention with heads in every layer, without "
            "sliding windows, latent or linear layers and double sparsity; use one engine for this "
            "model"
        )
    if kept.dtype in FP8_DTYPES or kept.dtype == FP4_DTYPE:
        raise ValueError(
            "a prefill/decode split needs kv_cache_dtype='auto'; fp8 scales and FP4 codes are not "
            "staged"
        )
    return pool_layers(cache.pool)


def kv_heads(model: ModelConfig) -> int:
    """Returns the number of KV heads of the whole model."""
    # staged_layers has seen to the kind.
    heads: int = getattr(model.mixers[0], "num_kv_heads")  # noqa: B009
    return heads


def geometry(model: ModelConfig, cache: Cache, dtype: torch.dtype) -> str:
    """The model and its rows, ranks left out: equal for engines that can exchange pages."""
    widths = [(name, width) for name, (_, width) in cache.layout.rows.items()]
    return f"{kv_heads(model)} KV heads of {widths} in {dtype}, {model}"
