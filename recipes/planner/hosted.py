"""Reckons what vLLM or SGLang takes: tensors as it makes them on its tags, and the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from kvcache import KVLayout
from memsaver.common.rounding import round_up
from recipes.errors import RecipeError
from recipes.planner.allocator import CachingAllocator
from recipes.planner.gpus import MIB, Gpu
from recipes.recipe import Recipe
from rollout.model import ModelConfig, rank_groups

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


def hosted_pool(recipe: Recipe, kept: KVLayout, nbytes: int, layers: int) -> int:
    """Bytes that the tag of the KV cache has: a tensor for each layer, with SGLang for its keys and
    its values. RecipeError for a model that keeps more than pages of all layers alike.
    """
    kind = recipe.engine.kind
    if not kept.pages_tell_all:
        rule = "how it keeps windows or states of linear layers is not planned"
        raise RecipeError(f"engine.kind={kind}: {rule}; set engine.kind=native")
    tensors = layers * (2 if kind == "sglang" else 1)
    return _region([nbytes // tensors] * tensors)


def _region(sizes: Iterable[int]) -> int:
    region = CachingAllocator()
    for number, nbytes in enumerate(sizes):
        region.allocate(number, nbytes)
    return region.reserved
