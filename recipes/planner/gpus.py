"""The planner's figures of GPUs: bytes, and what processes take there besides their tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from recipes.errors import RecipeError
from recipes.recipe import GPUS

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """total: what the driver offers. contexts: of a trainer and an engine that share it, with
    libraries, kernels and captured graphs. workspace: cuBLAS's, for each thread. measured: whether
    these were, or were taken over from a like GPU (total: from its data sheet).
    """

    name: str
    total: int
    contexts: int
    workspace: int
    measured: bool


_ALIKE: Any = {"contexts": 2104 * MIB, "workspace": 32 * MIB}
_KNOWN = {
    "h100-80gb": Gpu(name="h100-80gb", total=85_017_493_504, **_ALIKE, measured=True),
    "h200-141gb": Gpu(
        name="h200-141gb",
        total=150_109_880_320,
        contexts=2170 * MIB,
        workspace=32 * MIB,
        measured=True,
    ),
    "a100-80gb": Gpu(
        name="a100-80gb",
        total=84_987_740_160,
        contexts=2104 * MIB,
        workspace=8 * MIB,
        measured=False,
    ),
    "b200-192gb": Gpu(name="b200-192gb", total=191_503_138_816, **_ALIKE, measured=False),
}
assert tuple(_KNOWN) == GPUS


def find_gpu(text: str) -> tuple[Gpu, int | None]:
    """`h100-80gb` or `h100-80gb:8`: the GPU, and how many there are, where that is said."""
    found = re.fullmatch(r"([\w.-]+?)(?::(\d+))?", text)
    name, count = (found.group(1), found.group(2)) if found else (text, None)
    if name not in _KNOWN or count == "0":
        rule = f"must be one of {', '.join(_KNOWN)}, with a number of them as h100-80gb:8"
        raise RecipeError(f"--gpu {text}: {rule}")
    return _KNOWN[name], None if count is None else int(count)
