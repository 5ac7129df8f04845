"""Sizes an engine's KV pool, and tells whether the model can be kept as the recipe wants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memsaver.common.layout import round_up
from recipes.errors import RecipeError, one_line
from recipes.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from kvcache import KVLayout
    from rollout.model import ModelConfig


SHARE = 0.9  # of a GPU for weights and pool, at most, where the recipe does not say


def pool_tokens(recipe: Recipe, device: str, model: ModelConfig, longest_prompt: int) -> int:
    """Tokens that one device's pool holds: as given; or what (weights + states + pool) = fraction x
    the GPU's total bytes leaves; or, without either, what the requests that run at once can fill,
    where 0.9 of a GPU leave it. Raises RecipeError for an engine that this model cannot have.
    """
    import torch

    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    weights, kept = rank_weights(recipe, model, dtype), rank_kept(recipe, model.hf_config, dtype)
    tokens = recipe.engine.kv_tokens
    if tokens is None and recipe.engine.mem_fraction_static is None and device == "cpu":
        tokens = demanded_tokens(recipe, longest_prompt)
    elif tokens is None:
        tokens = _share(recipe, device, kept, weights, longest_prompt)
    _check_host_tier(recipe, kept, tokens)
    return tokens


def demanded_tokens(recipe: Recipe, longest_prompt: int) -> int:
    """Returns the tokens that the longest requests fill, as many as run on one engine at once."""
    engines = recipe.cluster.size // recipe.engine.tensor_parallel_size
    prompts = math.ceil(recipe.loop.prompts_per_step / engines)
    requests = prompts * recipe.loop.samples_per_prompt
    if recipe.eval.every:
        kinds = 1 + len(recipe.eval.also_digits)
        requests = max(requests, math.ceil(kinds * recipe.eval.problems / engines))
    each = round_up(longest_prompt + recipe.sampling.max_tokens, recipe.engine.page_size)
    return min(recipe.engine.max_running, requests) * each


def in_tokens(recipe: Recipe, tokens: int) -> str:
    """The overrides that give the pool so many tokens."""
    free = "" if recipe.engine.mem_fraction_static is None else "engine.mem_fraction_static=null "
    return f"{free}engine.kv_tokens={tokens}"


def rank_kept(recipe: Recipe, config: Any, dtype: torch.dtype) -> KVLayout:
    """Returns what one rank keeps of a token; RecipeError where the engine cannot."""
    from kvcache import layout
    from rollout.model import rank_layout

    stored = recipe.engine.kv_cache_dtype
    try:
        kept = layout(config, stored, dtype)
    except ValueError as error:
        key = f"engine.kv_cache_dtype={stored}"
        raise RecipeError(f"{key}: {one_line(error)}; set engine.kv_cache_dtype=auto") from None
    return rank_layout(kept, recipe.engine.tensor_parallel_size)


def pool_grows(recipe: Recipe, config: Any) -> bool:
    """Tells whether the pool may begin small. config: as of `rank_kept`."""
    import torch

    engine, dtype = recipe.engine, getattr(torch, recipe.model.dtype)
    alone = engine.tensor_parallel_size == 1 and not engine.host_to_device_ratio
    return alone and not engine.hosted and rank_kept(recipe, config, dtype).pages_tell_all


def rank_weights(recipe: Recipe, model: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes of rank 0's weights, none takes more. RecipeError for ranks that cannot be."""
    from rollout.model import rank_groups
    from rollout.weights import arena_nbytes

    size, experts = recipe.engine.tensor_parallel_size, recipe.engine.expert_parallel
    if experts > 1 and not model.has_experts:
        key, rule = "engine.expert_parallel", "the model has no experts to divide"
        raise RecipeError(f"{key}={experts}: {rule}; set {key}=1")
    try:
        return arena_nbytes(rank_groups(model, 0, size, experts), dtype)
    except ValueError as error:
        key = "engine.tensor_parallel_size"
        raise RecipeError(f"{key}={size}: {one_line(error)}; set {key}=1") from None


def state_bytes(recipe: Recipe, kept: KVLayout) -> int:
    """The bytes of a rank's states: of running requests, of kept prefixes, and for padding."""
    return (recipe.engine.max_running + recipe.engine.prefix_states + 1) * kept.state_bytes


def tokens_in_share(
    recipe: Recipe, kept: KVLayout, weights: int, total: int, longest_prompt: int
) -> int:
    """Tokens of a pool that fills its share of `total` bytes up, beside weights and states: all of
    `engine.mem_fraction_static`, or of 0.9 what requests can fill. Below one page: it does not fit.
    """
    fraction = recipe.engine.mem_fraction_static
    left = int((fraction or SHARE) * total) - weights - state_bytes(recipe, kept)
    pages = left // kept.bytes_per_token // recipe.engine.page_size - 1  # a page is padding
    tokens = pages * recipe.engine.page_size
    return tokens if fraction else min(tokens, demanded_tokens(recipe, longest_prompt))


def _share(recipe: Recipe, device: str, kept: KVLayout, weights: int, longest_prompt: int) -> int:
    engine = recipe.engine
    key = f"engine.mem_fraction_static={engine.mem_fraction_static or SHARE}"
    if device == "cpu":
        rule = "is a share of a GPU's memory, and device=cpu here"
        raise RecipeError(
            f"{key}: {rule}; set {in_tokens(recipe, round_up(4096, engine.page_size))}"
        )
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    tokens = tokens_in_share(recipe, kept, weights, total, longest_prompt)
    states = state_bytes(recipe, kept)
    if tokens >= engine.page_size:
        return tokens
    who = "the weights and states" if states else "the weights alone"
    least = (weights + states + 2 * engine.page_size * kept.bytes_per_token) / total
    remedy = f"set engine.mem_fraction_static={math.ceil(least * 100 + 0.01) / 100}"
    if least >= 0.98:
        remedy = "set engine.tensor_parallel_size higher, or take a smaller model"
    raise RecipeError(f"{key}: {who} take {weights + states} bytes of the GPU's {total}; {remedy}")


def _check_host_tier(recipe: Recipe, kept: KVLayout, tokens: int) -> None:
    ratio, page = recipe.engine.host_to_device_ratio, recipe.engine.page_size
    if not ratio:
        return
    key = "engine.host_to_device_ratio"
    if kept.pool not in ("mha", "mla") or kept.sliding_window is not None:
        rule = "pages of this model are not all that a sequence is made of"
        raise RecipeError(f"{key}={ratio}: {rule} (sliding windows or linear layers); set {key}=0")
    if int(ratio * tokens) < page:
        raise RecipeError(
            f"{key}={ratio}: {tokens} tokens times it hold no page of {page} tokens; set {key}=1"
        )
