"""Pages to staged bytes and back, in all layers of a pool of Qwen2.5-7B's shape, against the
device's copy rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvcache.ops.staging_copy import Writers, gather_staged, scatter_staged, staged_bytes
from kvcache.staging import pool_layers
from memsaver.system.machine import Impl
from tests.benchmarks.common import MIB, Figures, Scale, device_us, share
from tests.benchmarks.kvcache.pools import DIM, LAYERS, PAGE_SIZE, make_pool, shuffled_slots

Heads = tuple[int, int]  # first one, how many
# all that a source holds (as from 4 ranks to 2), and half of them (from 2 to 4)
GATHERED: dict[str, Heads] = {"all heads": (0, 4), "half of the heads": (2, 2)}
SCATTERED: dict[str, list[Heads]] = {
    "all heads": [(0, 4)],
    "half of the heads": [(2, 2)],
    "two writers": [(0, 2), (2, 2)],
}


def staging(scale: Scale) -> Figures:
    """Gather and scatter of as many staged bytes, the pages of 16 tokens in random order."""
    figures = []
    for size in ("tiny",) if scale.tiny else ("256 MiB", "1024 MiB"):
        for what, heads in GATHERED.items():
            figures += _gather(scale, size, f"{size}, gather, {what}", heads)
        for what, writers in SCATTERED.items():
            figures += _scatter(scale, size, f"{size}, scatter, {what}", writers)
    return figures


def _filled(scale: Scale, size: str, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys and values as int16 `[L, slots, H, D]`; half of the slots, whose `heads` heads
    take `size`.
    """
    layers = scale.choose(LAYERS, 2)
    token = layers * 2 * heads * DIM * 2  # bytes
    tokens = 32 if scale.tiny else int(size.split()[0]) * MIB // token // PAGE_SIZE * PAGE_SIZE
    pool = make_pool(scale.device, 2 * tokens, num_layers=layers)
    torch.manual_seed(0)
    k, v = (part.view(torch.int16).random_(-(2**15), 2**15) for part in pool_layers(pool))
    return k, v, shuffled_slots(scale.device, tokens, 2 * tokens // PAGE_SIZE)


def _gather(scale: Scale, size: str, name: str, heads: Heads) -> Figures:
    first, count = heads
    k, v, loc = _filled(scale, size, count)
    staged = torch.empty(
        staged_bytes(k, v, len(loc), count), dtype=torch.uint8, device=scale.device
    )

    def check() -> None:
        expected = [part[:, loc, first : first + count].flatten() for part in (k, v)]
        assert torch.equal(staged.view(torch.int16), torch.cat(expected)), name
        staged.zero_()

    run = partial(gather_staged, k, v, loc, first, count, staged)
    return _measure(scale, name, len(staged), run, check)


def _scatter(scale: Scale, size: str, name: str, heads: Sequence[Heads]) -> Figures:
    writers = Writers.of(heads, scale.device)
    k, v, loc = _filled(scale, size, writers.total)
    nbytes = staged_bytes(k, v, len(loc), writers.total)
    staged = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=scale.device)
    expected = [part.clone() for part in (k, v)]  # where nobody writes, all stays
    by_writer = staged.view(torch.int16).split(
        [nbytes // 2 // writers.total * count for _, count in heads]
    )
    for (first, count), rows in zip(heads, by_writer, strict=True):
        for part, of_part in zip(expected, rows.chunk(2), strict=True):
            part[:, loc, first : first + count] = of_part.view(len(k), len(loc), count, DIM)

    def check() -> None:
        for part, wanted in zip((k, v), expected, strict=True):
            assert torch.equal(part, wanted), name
            part[:, loc, heads[0][0]] = 0

    run = partial(scatter_staged, staged, k, v, loc, writers)
    return _measure(scale, name, nbytes, run, check)


def _measure(
    scale: Scale, name: str, nbytes: int, run: Callable[..., None], check: Callable[[], None]
) -> Figures:
    """`check`s what was done by either implementation, and undoes some of it."""
    figures = []
    ways: list[tuple[Impl, str, int, str]] = [
        ("triton", name, 10, ">= 90"),
        ("torch", f"{name}, by torch", 3, ""),
    ]
    for impl, what, launches, target in ways:
        run(impl=impl)
        check()
        us = device_us(scale, partial(run, impl=impl), launches)
        figures += share(scale, what, 2 * nbytes, us, target)
        check()
    return figures
