"""Sizes of GPUs, as measured, and of the engine, computed from the model's config."""

import dataclasses
import math
import re
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from kvcache import KVLayout
from memsaver.ops.layout import round_up
from recipes.config.recipe import Recipe
from recipes.config.sections import GPUS
from recipes.errors import RecipeError
from recipes.planner.allocator import MIB, CachingAllocator
from recipes.planner.planned_device import PAGE
from recipes.planner.planned_sides import PIECE, EngineSizes
from recipes.setup.model_files import meta_model
from recipes.setup.pool import (
    check_overlap,
    demanded_tokens,
    engine_config,
    pool_grows,
    rank_kv_layout,
    rank_weights,
    tokens_in_share,
)
from rollout.config import first_tokens
from rollout.model import GatedConfig, ModelConfig, load_model_config, rank_groups
from rollout.parallel import STAGING_BYTES
from rollout.pool_size import PoolSizeError, RankBytes
from trainer_bridge.sync import MESSAGE_BYTES

GIB = 1 << 30


class Gpu(NamedTuple):
    """A GPU, in bytes.

    Attributes:
        name: Name in a recipe.
        total: Memory that the driver offers.
        contexts: Contexts of a trainer and an engine that share the GPU, with libraries, kernels
            and captured graphs.
        workspace: Workspace of cuBLAS for each thread.
        link: Bytes per second between the GPU and pinned host memory.
        measured: Whether the sizes were measured; if not, they are those of a similar GPU, and
            total and link come from the data sheet.
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
    """Return the GPU that a text names, and the number of GPUs if the text has one.

    The text is a name such as `h100-80gb` or `h100-80gb:8`, or the bytes of a GPU.
    """
    if text.isdecimal() and int(text) >= GIB:
        return of_device(int(text)), None
    match = re.fullmatch(r"([\w.-]+?)(?::(\d+))?", text)
    name, count = (match.group(1), match.group(2)) if match else (text, None)
    if name not in GPUS or count == "0":
        rule = f"must be one of {', '.join(GPUS)}, perhaps with a number, such as h100-80gb:8"
        raise RecipeError(f"--gpu {text}: {rule}")
    return _KNOWN[GPUS.index(name)], None if count is None else int(count)


def of_device(total: int) -> Gpu:
    """Return the known GPU that is nearest in size, with its total set to `total` bytes."""
    nearest = min(_KNOWN, key=lambda gpu: abs(gpu.total - total))
    alike = abs(nearest.total - total) < 0.02 * total
    name = nearest.name if alike else f"gpu-{total // GIB}gb"
    return nearest._replace(name=name, total=total)


# Memory of NCCL on each GPU, as measured with groups of 2 and 4 H100 of one host.
TRAINER_GROUP = 400 * MIB
ENGINE_GROUP = 906 * MIB  # captured collectives included
CHECKPOINT = 450 * MIB  # more, once the trainer's ranks have saved a checkpoint
MESSAGES = 4 * MESSAGE_BYTES  # buffers of a sync between machines, two per direction


def trainer_group(recipe: Recipe) -> int:
    """Return the bytes that NCCL takes of each GPU for the trainer's ranks."""
    if recipe.cluster.size == 1:
        return 0
    return TRAINER_GROUP + (CHECKPOINT if recipe.checkpoint.every else 0)


def engine_group(recipe: Recipe) -> int:
    """Return the bytes that NCCL takes of each GPU for the ranks of an engine."""
    return ENGINE_GROUP if recipe.engine.tensor_parallel_size > 1 else 0


IDLE = 4 * MIB  # tables and counters of an idle engine, as measured


def engine_sizes(
    recipe: Recipe, fields: dict[str, Any], gpu: Gpu, prompt_tokens: int, exact: bool = False
) -> tuple[EngineSizes, int, int]:
    """Return the sizes of one engine rank, the tokens of its KV pool, and the bytes of a token.

    `fields` is the model's config, and `prompt_tokens` is the length of the longest prompt.
    """
    model = meta_model(fields)
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    engine, size, hosted = recipe.engine, recipe.engine.tensor_parallel_size, recipe.engine.hosted
    known = _known(model)
    if known is None:  # Assume an even share of the parameters.
        parameters = sum(param.numel() for param in model.parameters())
        weights = parameters * dtype.itemsize // size
    else:
        own = rank_weights(recipe, known, dtype)
        weights = hosted_weights(known, dtype, size) if hosted else own
    kv_layout = rank_kv_layout(recipe, model.config, dtype)
    check_overlap(recipe, kv_layout)
    tokens = _tokens(recipe, known, gpu, prompt_tokens)
    prefill = min(engine.max_prefill_tokens, recipe.prompts_per_step * prompt_tokens)
    config = dataclasses.replace(engine_config(recipe, prompt_tokens), max_prefill_tokens=prefill)
    rank = RankBytes(known or _dense(model.config), config, dtype)
    step, kv_cache = rank.step(LOGITS if hosted else 0), rank.kv_cache(tokens)
    if hosted:
        kv_cache = hosted_pool(recipe, kv_layout, kv_cache, fields["num_hidden_layers"])
    if exact and size > 2:  # gathered partial sums, and two sums that are smaller
        step += 2 * STAGING_BYTES
    # The plan counts memory that a hosted engine holds outside of its tags as contexts.
    idle, graphs = (0, False) if hosted else (IDLE, recipe.engine.cuda_graphs)
    idle += STAGING_BYTES if graphs and size > 1 else 0
    sizes = EngineSizes(
        weights=round_up(weights, PAGE),
        kv_cache=round_up(kv_cache, PAGE),
        grows=pool_grows(recipe, kv_layout),
        **_growing(recipe, kv_layout, tokens, prompt_tokens),
        cuda_graph=round_up(rank.graphs + gpu.workspace, PAGE) if graphs else 0,
        idle=idle,
        generating=idle + gpu.workspace + round_up(step, PAGE),
    )
    return sizes, tokens, kv_layout.bytes_per_token


def _tokens(recipe: Recipe, model: ModelConfig | None, gpu: Gpu, prompt_tokens: int) -> int:
    """Return the tokens of the KV pool, as in a run: those that fit if a request does not."""
    if recipe.engine.kv_tokens is not None:
        return recipe.engine.kv_tokens
    if model is None or recipe.engine.hosted:
        return demanded_tokens(recipe, prompt_tokens)
    try:
        return tokens_in_share(recipe, model, gpu.total, prompt_tokens)
    except PoolSizeError as error:
        return error.tokens


def _growing(
    recipe: Recipe, kv_layout: KVLayout, tokens: int, prompt_tokens: int
) -> dict[str, int]:
    """Return the bytes that a growing pool begins with and grows to, in whole pieces.

    It begins as in the engine (`first_tokens`, and padding). Each request takes a page more.
    """
    page, running = recipe.engine.page_size, recipe.engine.max_running
    first = first_tokens(prompt_tokens + recipe.sampling.max_tokens, tokens, page) + page
    wanted = demanded_tokens(recipe, prompt_tokens) + running * page
    sizes = {"least": first, "wanted": wanted}
    return {name: round_up(held * kv_layout.bytes_per_token, PIECE) for name, held in sizes.items()}


def _known(model: Any) -> ModelConfig | None:
    """Return the engine's config of the model; None if the engine does not support it."""
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        try:
            return load_model_config(folder)
        except ValueError:
            return None


def _dense(config: Any) -> ModelConfig:
    """Return a model of the same widths with a dense layer, in place of an unsupported model."""
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        rms_norm_eps=0.0,
        max_position_embeddings=0,
        tie_word_embeddings=False,
        mixers=(),
        mlps=(GatedConfig(inner=config.intermediate_size),),
        stop_token_ids=frozenset(),
        hf_config=config,
    )


# Measured with vLLM 0.24 asleep at the Qwen2.5-7B shape, with context and graphs of 51 sizes: 15.93
# GiB of an H100 were in use, 14.2 of them by others (docs/planner.md). SGLang is not measured.
OUTSIDE = 1772 * MIB
# Bytes for each logit beside bf16: in fp32 the logit, log-probability, probability and noise.
LOGITS = 16
_PADDED = 64  # Hosted engines pad the vocabulary to a multiple of 64 rows.
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def outside_of(recipe: Recipe, gpu: Gpu, measured: int | None) -> int:
    """Return the bytes outside of the tags of a plan with a hosted engine, contexts included.

    Without a measurement of a run, they are assumed to be half of the contexts, NCCL's, and
    OUTSIDE.
    """
    assumed = gpu.contexts // 2 + trainer_group(recipe) + engine_group(recipe) + OUTSIDE
    return assumed if measured is None else measured


def hosted_weights(model: ModelConfig, dtype: torch.dtype, ranks: int) -> int:
    """Return the bytes of a hosted engine's weights tag on each rank.

    The weights are fused as in the native engine, the vocabulary is padded, and the table of
    rotations is in fp32.
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
    """Return the bytes of a hosted engine's KV cache tag.

    vLLM has a tensor for each layer, SGLang one for the keys and one for the values of each layer.

    Raises:
        RecipeError: The model has sliding windows or linear layers.
    """
    kind = recipe.engine.kind
    if not kv_layout.pages_tell_all:
        rule = "plans do not cover its sliding windows or states of linear layers"
        raise RecipeError(f"engine.kind={kind}: {rule}; set engine.kind=native")
    tensors = layers * (2 if kind == "sglang" else 1)
    return _region([nbytes // tensors] * tensors)


def _region(sizes: Iterable[int]) -> int:
    region = CachingAllocator()
    for number, nbytes in enumerate(sizes):
        region.allocate(number, nbytes)
    return region.reserved
