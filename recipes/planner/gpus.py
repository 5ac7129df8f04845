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
    """`h100-80gb` or `h100-80gb:8`: the GPU, and how many there are, where that is said; or a GPU's
    bytes.
    """
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
