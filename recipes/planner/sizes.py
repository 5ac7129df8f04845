"""The planner's figures: of GPUs, and of the engine's side, from the model's config."""

import math
import re
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from kvcache import KVLayout
from memsaver.ops.layout import round_up
from recipes.config.models import GPUS
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError
from recipes.planner.allocator import MIB, CachingAllocator
from recipes.planner.tracing import PAGE, PIECE, EngineSizes
from recipes.setup.models import meta_model
from recipes.setup.preparation import (
    check_overlap,
    demanded_tokens,
    pool_grows,
    rank_kv_layout,
    rank_weights,
    state_bytes,
    tokens_in_share,
)
from rollout.config import first_tokens
from rollout.model import ModelConfig, load_model_config, rank_groups

GIB = 1 << 30


class Gpu(NamedTuple):
    """total: what the driver offers. contexts: of a trainer and an engine that share it, with
    libraries, kernels and captured graphs. workspace: cuBLAS's, for each thread. link: bytes a
    second between it and pinned host memory. measured: whether these were, or were taken over from
    a like GPU (total, link: from its data sheet).
    """

    name: str
    total: int
    contexts: int
    workspace: int
    link: int
    measured: bool


_KNOWN = (
    Gpu("h100-80gb", 85_017_493_504, 2104 * MIB, 32 * MIB, 46 * GIB, measured=True),
    Gpu("h200-141gb", 150_109_880_320, 2170 * MIB, 32 * MIB, 46 * GIB, measured=True),
    Gpu("a100-80gb", 84_987_740_160, 2104 * MIB, 8 * MIB, 23 * GIB, measured=False),
    Gpu("b200-192gb", 191_503_138_816, 2104 * MIB, 32 * MIB, 46 * GIB, measured=False),
)
assert tuple(gpu.name for gpu in _KNOWN) == GPUS


def find_gpu(text: str) -> tuple[Gpu, int | None]:
    """`h100-80gb` or `h100-80gb:8`, or a GPU's bytes: the GPU, and how many if that is said."""
    if text.isdecimal() and int(text) >= GIB:
        return of_device(int(text)), None
    found = re.fullmatch(r"([\w.-]+?)(?::(\d+))?", text)
    name, count = (found.group(1), found.group(2)) if found else (text, None)
    if name not in GPUS or count == "0":
        rule = f"must be one of {', '.join(GPUS)}, with a number of them as h100-80gb:8"
        raise RecipeError(f"--gpu {text}: {rule}")
    return _KNOWN[GPUS.index(name)], None if count is None else int(count)


def of_device(total: int) -> Gpu:
    """Returns the figures of the known GPU that is nearest in size, with this one's bytes."""
    nearest = min(_KNOWN, key=lambda gpu: abs(gpu.total - total))
    alike = abs(nearest.total - total) < 0.02 * total
    name = nearest.name if alike else f"gpu-{total // GIB}gb"
    return nearest._replace(name=name, total=total)


IDLE = 4 * MIB  # tables and counters of an engine that does nothing, as measured


def engine_sizes(
    recipe: Recipe, fields: dict[str, Any], gpu: Gpu, prompt_tokens: int
) -> tuple[EngineSizes, int, int]:
    """One rank's bytes; the tokens that its KV pool holds; and the bytes of one token in it."""
    model = meta_model(fields)
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    size, hosted = recipe.engine.tensor_parallel_size, recipe.engine.hosted
    known = _known(model)
    if known is None:  # an even share
        parameters = sum(param.numel() for param in model.parameters())
        weights = parameters * dtype.itemsize // size
        inner = fields["intermediate_size"] // size
        widths = [2 * inner, inner]
    else:
        own = rank_weights(recipe, known, dtype)
        weights = hosted_weights(known, dtype, size) if hosted else own
        hidden = known.hidden_size
        experts = recipe.engine.expert_parallel
        widths = max((mlp.widths(hidden, size, experts) for mlp in known.mlps), key=sum)
    kv_layout = rank_kv_layout(recipe, model.config, dtype)
    check_overlap(recipe, kv_layout)
    states, tokens = state_bytes(recipe, kv_layout), recipe.engine.kv_tokens
    if tokens is None:
        tokens = demanded_tokens(recipe, prompt_tokens)
        if not hosted:
            share = tokens_in_share(recipe, kv_layout, weights, gpu.total, prompt_tokens)
            tokens = max(0, share)
    padded = tokens + recipe.engine.page_size
    kv_cache = round_up(padded * kv_layout.bytes_per_token + states, PAGE)
    if hosted:
        layers = fields["num_hidden_layers"]
        kv_cache = hosted_pool(recipe, kv_layout, padded * kv_layout.bytes_per_token, layers)
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
        grows=pool_grows(recipe, kv_layout),
        **_growing(recipe, kv_layout, tokens, prompt_tokens),
        cuda_graph=_graphs(recipe, fields, gpu, dtype, widths) if graphs else 0,
        idle=idle,
        generating=idle + gpu.workspace + round_up(step, PAGE),
    )
    return sizes, tokens, kv_layout.bytes_per_token


def _growing(
    recipe: Recipe, kv_layout: KVLayout, tokens: int, prompt_tokens: int
) -> dict[str, int]:
    """Return what a pool that grows begins with and grows to: as the engine does (`first_tokens`,
    and padding), and a page more for each request; in whole pieces.
    """
    page, running = recipe.engine.page_size, recipe.engine.max_running
    first = first_tokens(prompt_tokens + recipe.sampling.max_tokens, tokens, page) + page
    wanted = demanded_tokens(recipe, prompt_tokens) + running * page
    sizes = {"least": first, "wanted": wanted}
    return {name: round_up(held * kv_layout.bytes_per_token, PIECE) for name, held in sizes.items()}


def _known(model: Any) -> ModelConfig | None:
    """Returns the model as the engine knows it; None: it cannot compute it."""
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        try:
            return load_model_config(folder)
        except ValueError:
            return None


def _graphs(
    recipe: Recipe, fields: dict[str, Any], gpu: Gpu, dtype: torch.dtype, widths: list[int]
) -> int:
    """Logits, cuBLAS's workspace, and what the largest batch computes in, all layers in turn."""
    running = recipe.engine.max_running
    pool = CachingAllocator()
    pool.allocate("workspace", gpu.workspace)
    pool.allocate("small", 1)
    for number, width in enumerate((*widths, fields["hidden_size"])):
        pool.allocate(f"block {number}", running * width * dtype.itemsize)
    return round_up(
        round_up(running * fields["vocab_size"] * dtype.itemsize, PAGE) + pool.reserved, PAGE
    )


# Of vLLM 0.24 asleep at the Qwen2.5-7B shape, context and graphs of 51 sizes included: an H100 had
# 15.93 GiB in use, 14.2 of them others' (docs/planner.md). SGLang's was not measured.
OUTSIDE = 1772 * MIB
LOGITS = 18  # bytes a logit: bf16, and in fp32 itself, log-probabilities, probabilities and noise
_PADDED = 64  # rows of the vocabulary
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def outside_of(gpu: Gpu, measured: int | None) -> int:
    """Bytes on none of the tags that a plan knows, contexts included: as a run measured them at its
    start, or the trainer's half of the contexts and OUTSIDE.
    """
    return gpu.contexts // 2 + OUTSIDE if measured is None else measured


def hosted_weights(model: ModelConfig, dtype: torch.dtype, ranks: int) -> int:
    """Bytes that the tag of the weights has on each of the ranks of an engine: fused as in the
    native one, the vocabulary padded, and the table of rotations, made in fp32.
    """
    groups = rank_groups(model, 0, ranks)
    sizes = [_elements(group, ranks) * dtype.itemsize for group in groups]
    width = getattr(model.mixers[0], "head_dim", 0)
    return _region([*sizes, model.max_position_embeddings * width * torch.float32.itemsize])


def _elements(group: Any, ranks: int) -> int:
    if group.params[0].name.endswith(_VOCABULARY):
        rows, width = group.params[0].shape
        return round_up(rows * ranks, _PADDED) // ranks * width
    return sum(math.prod(param.shape) for param in group.params)


def hosted_pool(recipe: Recipe, kv_layout: KVLayout, nbytes: int, layers: int) -> int:
    """Bytes that the tag of the KV cache has: a tensor for each layer, with SGLang for its keys and
    its values. RecipeError for a model that keeps more than pages of all layers alike.
    """
    kind = recipe.engine.kind
    if not kv_layout.pages_tell_all:
        rule = "how it keeps windows or states of linear layers is not planned"
        raise RecipeError(f"engine.kind={kind}: {rule}; set engine.kind=native")
    tensors = layers * (2 if kind == "sglang" else 1)
    return _region([nbytes // tensors] * tensors)


def _region(sizes: Iterable[int]) -> int:
    region = CachingAllocator()
    for number, nbytes in enumerate(sizes):
        region.allocate(number, nbytes)
    return region.reserved
