"""Sizes of GPUs, as measured, and of the engine, computed from the model's config."""

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

from kvcache import KVLayout
from memsaver.ops.layout import round_up
from memsaver.system.host_memory import total_memory
from recipes.config.decisions import why_ray
from recipes.config.recipe import Recipe
from recipes.config.sections import GPUS
from recipes.errors import RecipeError, refused
from recipes.planner.planned_device import PAGE
from recipes.planner.planned_sides import PIECE, EngineSizes
from recipes.setup.model_files import meta_model
from recipes.setup.pool import (
    check_overlap,
    check_ranks,
    demanded_tokens,
    engine_rank,
    pool_grows,
    pool_tokens,
    tokens_in_share,
)
from rollout.config import first_tokens
from rollout.model import GatedConfig, ModelConfig, load_hf_config, load_model_config
from rollout.pool_size import PoolSizeError, RankBytes

MIB = 1 << 20
GIB = 1 << 30


class Gpu(NamedTuple):
    """A GPU, or a CPU with its share of the host's memory, in bytes.

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

    @property
    def on_host(self) -> bool:
        """Return whether this is a CPU, whose memory is the host's."""
        return self.name == "cpu"


_KNOWN = (
    Gpu("h100-80gb", 85_017_493_504, 2104 * MIB, 32 * MIB, 46 * GIB, measured=True),
    Gpu("h200-141gb", 150_109_880_320, 2170 * MIB, 32 * MIB, 46 * GIB, measured=True),
    Gpu("a100-80gb", 84_987_740_160, 2104 * MIB, 8 * MIB, 23 * GIB, measured=False),
    Gpu("b200-192gb", 191_503_138_816, 2104 * MIB, 32 * MIB, 46 * GIB, measured=False),
)
# Bytes of a process without tags and tensors. Plan and measured peak in MiB: 778 and 695 for the
# recipe tiny; for a model of 70 M parameters 2104 and 2182, or 2852 and 2844 if its tags leave.
_CPU_PROCESS = 640 * MIB
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


def of_host(recipe: Recipe) -> Gpu:
    """Return one of a recipe's devices on the CPU: an even share of the machine's memory.

    The machine has `cluster.host_gib`, or the memory of this machine.
    """
    cluster = recipe.cluster
    total = total_memory() if cluster.host_gib is None else int(cluster.host_gib * GIB)
    processes = 2 if why_ray(recipe) else 1
    share, contexts = total // cluster.per_node, processes * _CPU_PROCESS
    return Gpu("cpu", share, contexts, workspace=0, link=1, measured=True)


def engine_sizes(
    recipe: Recipe, directory: Path, gpu: Gpu, prompt_tokens: int, exact: bool = False
) -> tuple[EngineSizes, int, int]:
    """Return the sizes of one engine rank, the tokens of its KV pool, and the bytes of a token.

    `directory` is the model's folder, and `prompt_tokens` is the length of the longest prompt.
    """
    known = _known(directory)
    rank = engine_rank(recipe, known or _dense(load_hf_config(directory)), prompt_tokens)
    check_ranks(recipe, rank, supported=known is not None)
    weights = rank.weights if known else _even_share(directory, rank)
    check_overlap(recipe, rank.layout)
    tokens = _tokens(recipe, rank if known else None, gpu, prompt_tokens)
    try:
        kv_cache = rank.kv_cache(tokens)
    except ValueError as error:
        raise refused("engine.kind", recipe.engine.kind, str(error), "native") from None
    prefill = min(recipe.engine.max_prefill_tokens, recipe.prompts_per_step * prompt_tokens)
    config = dataclasses.replace(rank.config, max_prefill_tokens=prefill, exact=exact)
    step = dataclasses.replace(rank, config=config).step()
    sizes = EngineSizes(
        weights=round_up(weights, PAGE),
        adapter_slots=round_up(rank.adapter_slots, PAGE),
        kv_cache=round_up(kv_cache, PAGE),
        grows=pool_grows(recipe, rank.layout),
        **_growing(recipe, rank.layout, tokens, prompt_tokens),
        cuda_graph=round_up(rank.graphs + gpu.workspace, PAGE) if rank.graphs else 0,
        idle=rank.idle,
        generating=rank.idle + gpu.workspace + round_up(step, PAGE),
    )
    return sizes, tokens, rank.layout.bytes_per_token


def _known(directory: Path) -> ModelConfig | None:
    """Return the engine's config of the model; None if the engine does not support it."""
    try:
        return load_model_config(directory)
    except ValueError:
        return None


def _even_share(directory: Path, rank: RankBytes) -> int:
    """Return the bytes of a rank's weights of an unsupported model, divided evenly."""
    model = meta_model(load_hf_config(directory).to_dict())
    parameters = sum(param.numel() for param in model.parameters())
    return parameters * rank.dtype.itemsize // rank.config.tensor_parallel_size


def _tokens(recipe: Recipe, rank: RankBytes | None, gpu: Gpu, prompt_tokens: int) -> int:
    """Return the tokens of the KV pool, as in a run: those that fit if a request does not."""
    if rank is not None and gpu.on_host:
        return pool_tokens(recipe, "cpu", rank.model, prompt_tokens)
    if recipe.engine.kv_tokens is not None:
        return recipe.engine.kv_tokens
    if rank is None or recipe.engine.hosted:
        return demanded_tokens(recipe, prompt_tokens)
    try:
        return tokens_in_share(recipe, rank, gpu.total, prompt_tokens)
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
