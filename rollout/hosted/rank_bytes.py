"""The bytes that one rank of a hosted engine takes on its tags, and outside of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from memsaver.memory import CachingAllocator
from memsaver.ops.layout import round_up
from rollout.model import rank_groups
from rollout.pool_size import RankBytes

# Measured with vLLM 0.24 asleep at the Qwen2.5-7B shape, with context and graphs of 51 sizes: 15.93
# GiB of an H100 were in use, 14.2 of them by others (docs/planner.md). SGLang is not measured.
OUTSIDE = 1772 << 20
_PADDED = 64  # Hosted engines pad the vocabulary to a multiple of 64 rows.
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class HostedBytes(RankBytes):
    """The bytes of a rank of vLLM or SGLang, which has no graphs on a tag.

    Its memory outside of tags, while it does not run a step, counts as `OUTSIDE`.

    Attributes:
        kind: Either vllm or sglang.
    """

    kind: str

    graphs = idle = 0  # type: ignore[assignment]
    _per_logit = 4 * 4  # In fp32 the logit, log-probability, probability and noise.

    @cached_property
    def weights(self) -> int:  # type: ignore[override]
        """Return the bytes of the tag `weights`.

        The weights are fused as in the native engine, the vocabulary is padded, and the table of
        rotations is in fp32.
        """
        model, ranks = self.model, self.config.tensor_parallel_size
        groups = rank_groups(model, 0, ranks)
        sizes = [_elements(group, ranks) * self.dtype.itemsize for group in groups]
        width = getattr(model.mixers[0], "head_dim", 0)
        return _region([*sizes, model.max_position_embeddings * width * torch.float32.itemsize])

    def kv_cache(self, tokens: int) -> int:
        """Return the bytes of the tag `kv_cache`.

        vLLM has a tensor for each layer, SGLang one for the keys and one for the values of each.

        Raises:
            ValueError: The model has sliding windows or linear layers.
        """
        if not self.layout.pages_tell_all:
            raise ValueError("plans do not cover its sliding windows or states of linear layers")
        stored = self.layout.layers("full", "sliding", "mla")
        tensors = len(stored) * (2 if self.kind == "sglang" else 1)
        return _region([super().kv_cache(tokens) // tensors] * tensors)


def _elements(group: Any, ranks: int) -> int:
    if group.params[0].name.endswith(_VOCABULARY):
        rows, width = group.params[0].shape
        return round_up(rows * ranks, _PADDED) // ranks * width
    return sum(math.prod(param.shape) for param in group.params)


def _region(sizes: Iterable[int]) -> int:
    region = CachingAllocator()
    for number, nbytes in enumerate(sizes):
        region.allocate(number, nbytes)
    return region.reserved
