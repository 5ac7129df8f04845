"""Tells whether an engine's cache can be staged, and in what words two engines compare theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.pools import MHATokenToKVPool
from kvcache.staging import pool_layers
from rollout.model.config import ModelConfig
from rollout.serving.kv_setup import Cache


def staged_layers(cache: Cache) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, as the staging kernels take them; ValueError for a cache that
    is not of pages of full attention only.
    """
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
    """The model and the rows that it keeps, ranks left out: equal for engines that can exchange
    pages.
    """
    widths = [(name, width) for name, (_, width) in cache.layout.rows.items()]
    return f"{kv_heads(model)} KV heads of {widths} in {dtype}, {model}"
