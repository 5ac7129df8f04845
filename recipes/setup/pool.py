"""The size of the KV pool: what requests need, what a GPU leaves, and what does not fit."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcache import KVLayout, layout
from memsaver.ops.layout import round_up
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, one_line, refused, shown
from rollout import AdapterSlots, EngineConfig, pool_size
from rollout.config import why_one_size
from rollout.hosted import HostedBytes
from rollout.model import ModelConfig
from rollout.pool_size import CPU_TOKENS, WITH_SAVER, PoolSizeError, RankBytes

SIZES = (
    *("page_size", "max_running", "max_prefill_tokens", "cuda_graphs", "kv_cache_dtype"),
    *("tensor_parallel_size", "expert_parallel", "prefix_states"),
)
"""Keys of the section `engine` that are fields of the native engine's `EngineConfig`."""


def request_tokens(recipe: Recipe, longest_prompt: int) -> int:
    """Return the pool tokens of the longest prompt and answer, in whole pages."""
    return round_up(longest_prompt + recipe.sampling.max_tokens, recipe.engine.page_size)


Shorter = Callable[[int], list[str]]
"""Maps a number of tokens to the settings that leave longer prompts out."""


def pool_fault(
    recipe: Recipe,
    longest: int,
    kv_tokens: int,
    whose: str = "",
    shorter: Shorter = lambda limit: [],
) -> tuple[str, str] | None:
    """Return the fault and the remedy of a pool that cannot hold the longest request, else None.

    Other arguments are as in `check_context`.
    """
    answer, page = recipe.sampling.max_tokens, recipe.engine.page_size
    need = request_tokens(recipe, longest)
    if need <= kv_tokens:
        return None
    share = recipe.engine.mem_fraction_static is not None
    key = "mem_fraction_static" if share else "kv_tokens"
    rule = f"the KV pool of {kv_tokens} tokens is too small for one request of "
    rule += f"{longest} + {answer} tokens in pages of {page}{whose}"
    ways = [f"{in_tokens(recipe, need)} or more", *shorter(kv_tokens // page * page - answer)]
    fault = f"engine.{key}={shown(getattr(recipe.engine, key))}: {rule}"
    return fault, f"set {', or '.join(ways)}"


def pool_tokens(recipe: Recipe, device: str, model: ModelConfig, longest_prompt: int) -> int:
    """Return the tokens of one device's KV pool.

    `engine.kv_tokens` sets them. Otherwise they are those of `tokens_in_share`, and on a CPU those
    of the requests that run together.

    Raises:
        RecipeError: The engine cannot serve this model, or the pool does not fit.
    """
    rank, tokens = engine_rank(recipe, model, longest_prompt), recipe.engine.kv_tokens
    check_ranks(recipe, rank)
    if tokens is None and recipe.engine.mem_fraction_static is None and device == "cpu":
        tokens = demanded_tokens(recipe, longest_prompt)
    elif tokens is None:
        tokens = _share(recipe, device, rank, longest_prompt)
    check_overlap(recipe, rank.layout)
    _check_host_tier(recipe, rank.layout, tokens)
    return tokens


def adapter_slots(recipe: Recipe) -> AdapterSlots | None:
    """Return the engine's room for adapters, of which a new version is written beside the old."""
    if recipe.served_adapter is None:
        return None
    layers = tuple(recipe.lora.target_modules)
    return AdapterSlots(slots=2, rank=recipe.lora.rank, target_modules=layers)


def engine_rank(recipe: Recipe, model: ModelConfig, longest_prompt: int) -> RankBytes:
    """Return the bytes of rank 0 of an engine, which has the most, without a size of its pool.

    Raises:
        RecipeError: The engine cannot cache this model's keys and values.
    """
    engine, dtype = recipe.engine, getattr(torch, recipe.model.dtype)
    fields: dict[str, Any] = {name: getattr(engine, name) for name in SIZES}
    longest = longest_prompt + recipe.sampling.max_tokens
    config = EngineConfig(max_context_len=longest, adapters=adapter_slots(recipe), **fields)
    rank = RankBytes(model, config, dtype)
    if engine.hosted:
        rank = HostedBytes(model, config, dtype, engine.kind)
    with _refusing("engine.kv_cache_dtype", engine.kv_cache_dtype, "auto"):
        layout(model.hf_config, engine.kv_cache_dtype, dtype)
    return rank


def check_ranks(recipe: Recipe, rank: RankBytes, supported: bool = True) -> None:
    """Refuse ranks among which an engine cannot divide a model; weights only of supported ones."""
    experts, size = recipe.engine.expert_parallel, recipe.engine.tensor_parallel_size
    if supported and experts > 1 and not rank.model.has_experts:
        raise refused("engine.expert_parallel", experts, "the model has no experts to divide", 1)
    with _refusing("engine.tensor_parallel_size", size, 1):
        _ = supported and rank.weights
        _ = rank.layout


@contextmanager
def _refusing(key: str, value: Any, instead: Any) -> Iterator[None]:
    """Turn a ValueError inside the block into the refusal of a key."""
    try:
        yield
    except ValueError as error:
        raise refused(key, value, one_line(error), instead) from None


def demanded_tokens(recipe: Recipe, longest_prompt: int) -> int:
    """Return the tokens that one engine's running requests fill if all are as long as allowed."""
    engines = recipe.cluster.engine_ranks // recipe.engine.tensor_parallel_size
    prompts = math.ceil(recipe.prompts_per_step / engines)
    requests = prompts * recipe.samples_per_prompt
    if recipe.eval.every:
        sets = 1 + len(recipe.task.mixture) + len(recipe.eval.sets)
        problems = math.ceil(sets * recipe.eval.problems / engines)
        requests = max(requests, problems * recipe.eval.samples)
    return min(recipe.engine.max_running, requests) * request_tokens(recipe, longest_prompt)


def in_tokens(recipe: Recipe, tokens: int) -> str:
    """Return the overrides that set the pool to this number of tokens."""
    free = "" if recipe.engine.mem_fraction_static is None else "engine.mem_fraction_static=null "
    return f"{free}engine.kv_tokens={tokens}"


def pool_grows(recipe: Recipe, kv_layout: KVLayout) -> bool:
    """Return whether the engine's KV pool can begin small and grow."""
    return not recipe.engine.hosted and _why_one_size(recipe, kv_layout) is None


def _why_one_size(recipe: Recipe, kv_layout: KVLayout) -> str | None:
    engine = recipe.engine
    tiers = engine.host_to_device_ratio > 0
    return why_one_size(kv_layout.pages_tell_all, engine.tensor_parallel_size, tiers)


def check_overlap(recipe: Recipe, kv_layout: KVLayout) -> None:
    """Refuse tags of `cycle.overlap` if the KV pool cannot grow while they leave."""
    named = recipe.cycle.overlap
    if named not in ("auto", []) and (why := _why_one_size(recipe, kv_layout)):
        rule = f"needs a KV cache that grows, and this one does not: {why}"
        raise refused("cycle.overlap", named, rule, "auto")


def tokens_in_share(recipe: Recipe, rank: RankBytes, total: int, longest_prompt: int) -> int:
    """Return the tokens of a pool that shares part of a GPU of `total` bytes (`pool_size`).

    With `engine.mem_fraction_static` the pool fills that share. Without it, the pool takes the
    tokens that running requests can fill, within 0.9 of the GPU.

    Raises:
        PoolSizeError: The pool would not hold the longest request.
    """
    fraction = recipe.engine.mem_fraction_static
    share = fraction or WITH_SAVER
    tokens = pool_size(rank.model, rank.config, total, share, rank.dtype, filters=False)
    return tokens if fraction else min(tokens, demanded_tokens(recipe, longest_prompt))


def _share(recipe: Recipe, device: str, rank: RankBytes, longest_prompt: int) -> int:
    engine = recipe.engine
    key = f"engine.mem_fraction_static={engine.mem_fraction_static or WITH_SAVER}"
    if device == "cpu":
        rule = "is a share of a GPU's memory, and the device is a CPU"
        raise RecipeError(
            f"{key}: {rule}; set {in_tokens(recipe, round_up(CPU_TOKENS, engine.page_size))}"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        return tokens_in_share(recipe, rank, total, longest_prompt)
    except PoolSizeError as error:
        if error.tokens:  # `pool_fault` names the longest request.
            return error.tokens
        remedy = f"set engine.mem_fraction_static={error.least}"
        if error.least >= 0.98:
            remedy = "set engine.tensor_parallel_size higher, or take a smaller model"
        raise RecipeError(f"{key}: {error.why}; {remedy}") from None


def _check_host_tier(recipe: Recipe, kv_layout: KVLayout, tokens: int) -> None:
    ratio, page = recipe.engine.host_to_device_ratio, recipe.engine.page_size
    if not ratio:
        return
    key = "engine.host_to_device_ratio"
    if kv_layout.pool not in ("mha", "mla") or kv_layout.sliding_window is not None:
        rule = "its pages do not hold a whole sequence (sliding windows or linear layers)"
        raise refused(key, ratio, rule, 0)
    if int(ratio * tokens) < page:
        raise refused(key, ratio, f"of {tokens} tokens is less than a page of {page} tokens", 1)
