"""The planner's figures of GPUs: bytes, and what processes take there besides their tensors."""

from __future__ import annotations

import re
from typing import NamedTuple

from recipes.errors import RecipeError
from recipes.recipe import GPUS

MIB = 1 << 20
GIB = 1 << 30


class Gpu(NamedTuple):
    """total: what the driver offers. contexts: of a trainer and an engine that share it, with
    libraries, kernels and captured graphs. workspace: cuBLAS's, for each thread. measured: whether
    these were, or were taken over from a like GPU (total: from its data sheet).
    """

    name: str
    total: int
    contexts: int
    workspace: int
    measured: bool


_KNOWN = (
    Gpu("h100-80gb", 85_017_493_504, 2104 * MIB, 32 * MIB, measured=True),
    Gpu("h200-141gb", 150_109_880_320, 2170 * MIB, 32 * MIB, measured=True),
    Gpu("a100-80gb", 84_987_740_160, 2104 * MIB, 8 * MIB, measured=False),
    Gpu("b200-192gb", 191_503_138_816, 2104 * MIB, 32 * MIB, measured=False),
)
assert tuple(gpu.name for gpu in _KNOWN) == GPUS


def find_gpu(text: str) -> tuple[Gpu, int | None]:
    """`h100-80gb` or `h100-80gb:8`: the GPU, and how many there are, where that is said."""
    found = re.fullmatch(r"([\w.-]+?)(?::(\d+))?", text)
    name, count = (found.group(1), found.group(2)) if found else (text, None)
    if name not in GPUS or count == "0":
        rule = f"must be one of {', '.join(GPUS)}, with a number of them as h100-80gb:8"
        raise RecipeError(f"--gpu {text}: {rule}")
    return _KNOWN[GPUS.index(name)], None if count is None else int(count)
