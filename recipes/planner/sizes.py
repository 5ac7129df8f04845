"""Bytes on the engine's side, from the model's config."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from memsaver.common.rounding import round_up
from recipes.planner.allocator import MIB, CachingAllocator
from recipes.planner.engine import LEAST, EngineSizes
from recipes.planner.gpus import Gpu
from recipes.planner.hosted import LOGITS, hosted_pool, hosted_weights
from recipes.planner.tracing import PAGE
from recipes.recipe import Recipe
from recipes.setup.models import meta_model
from recipes.setup.pool import (
    demanded_tokens,
    rank_kept,
    rank_weights,
    state_bytes,
    tokens_in_share,
)
from rollout.model import ModelConfig, load_model_config

IDLE = 4 * MIB  # tables and counters of an engine that does nothing, as measured


def engine_sizes(
    recipe: Recipe, fields: dict[str, Any], gpu: Gpu, prompt_tokens: int
) -> tuple[EngineSizes, int, int]:
    """One rank's bytes; the tokens that its KV pool holds; and the bytes of one token in it."""
    model = meta_model(fields)
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    size, hosted = recipe.engine.tensor_parallel_size, recipe.engine.hosted
    known = _known(model, size)
    if known is None:  # an even share
        parameters = sum(param.numel() for param in model.parameters())
        weights = parameters * dtype.itemsize // size
        inner = fields["intermediate_size"] // size
        widths = [2 * inner, inner]
    else:
        own = rank_weights(recipe, known, dtype)
        weights = hosted_weights(known, dtype, size) if hosted else own
        hidden = known.hidden_size
        widths = max((mlp.widths(hidden, size) for mlp in known.mlps), key=sum)
    kept = rank_kept(recipe, model.config, dtype)
    states, tokens = state_bytes(recipe, kept), recipe.engine.kv_tokens
    if tokens is None:
        tokens = demanded_tokens(recipe, prompt_tokens)
        if not hosted:
            share = tokens_in_share(recipe, kept, weights, gpu.total, prompt_tokens)
            tokens = max(0, share)
    padded = tokens + recipe.engine.page_size
    kv_cache = round_up(padded * kept.bytes_per_token + states, PAGE)
    if hosted:
        layers = fields["num_hidden_layers"]
        kv_cache = hosted_pool(recipe, kept, padded * kept.bytes_per_token, layers)
    running, vocabulary = recipe.engine.max_running, fields["vocab_size"]
    inner = sum(widths) + 8 * fields["hidden_size"]
    prefill = min(recipe.engine.max_prefill_tokens, recipe.loop.prompts_per_step * prompt_tokens)
    logits = running * vocabulary * (LOGITS if hosted else 4)
    step = max(logits + 2 * MIB, prefill * inner * dtype.itemsize)
    # what a hosted engine holds outside of its tags is among the plan's contexts
    idle, graphs = (0, False) if hosted else (IDLE, recipe.engine.cuda_graphs)
    sizes = EngineSizes(
        weights=round_up(weights, PAGE),
        kv_cache=kv_cache,
        wanted=_wanted(recipe, kept.bytes_per_token, prompt_tokens),
        cuda_graph=_graphs(recipe, fields, gpu, dtype, widths) if graphs else 0,
        idle=idle,
        generating=idle + gpu.workspace + round_up(step, PAGE),
    )
    return sizes, tokens, kept.bytes_per_token


def _wanted(recipe: Recipe, token_bytes: int, prompt_tokens: int) -> int:
    """Bytes that a pool grows to: a page more for each request, in whole pieces."""
    spare = recipe.engine.max_running * recipe.engine.page_size
    tokens = demanded_tokens(recipe, prompt_tokens) + spare
    return round_up(tokens * token_bytes, LEAST)


def _known(model: Any, ranks: int) -> ModelConfig | None:
    """Returns the model as the engine knows it; None: it cannot compute it, or not by several ranks
    what is planned all the same (DeepSeek with experts).
    """
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        try:
            known = load_model_config(folder)
        except ValueError:
            return None
    latent = getattr(model.config, "kv_lora_rank", None)
    return None if latent and known.has_experts and ranks > 1 else known


def _graphs(
    recipe: Recipe, fields: dict[str, Any], gpu: Gpu, dtype: torch.dtype, widths: list[int]
) -> int:
    """Logits, cuBLAS's workspace, and what the largest batch computes in: blocks are used again
    from layer to layer.
    """
    running = recipe.engine.max_running
    pool = CachingAllocator()
    pool.allocate("workspace", gpu.workspace)
    pool.allocate("small", 1)
    for number, width in enumerate((*widths, fields["hidden_size"])):
        pool.allocate(f"block {number}", running * width * dtype.itemsize)
    return round_up(
        round_up(running * fields["vocab_size"] * dtype.itemsize, PAGE) + pool.reserved, PAGE
    )
