"""A pool that shrinks and grows by 10 GiB under a captured graph, beside the driver's own calls for
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvcache.pools import MHATokenToKVPool
from memsaver import MemorySaver
from tests.benchmarks.common import (
    GIB,
    MIB,
    Figure,
    Figures,
    Scale,
    Times,
    extent_by_driver,
    others_write,
)
from tests.benchmarks.kvcache.pools import DIM, HEADS, LAYERS, PAGE_SIZE, make_pool

TOKENS = 64  # that the graph writes and reads


def resize(scale: Scale) -> Figures:
    nbytes = 10 * MIB if scale.tiny else 10 * GIB
    saver = MemorySaver(scale.device)
    tokens = 2 * nbytes // (LAYERS * 2 * HEADS * DIM * 2) // PAGE_SIZE * PAGE_SIZE
    pool = make_pool(scale.device, tokens, saver, slot_major=True)
    ours, moved = _cycles(scale, saver, pool, nbytes)
    saver.close()
    assert scale.tiny or moved >= nbytes, "less was given back than asked for"
    floor = extent_by_driver(scale.device, moved, "grow", "shrink", partial(others_write, scale, 0))
    found = [Figure(what="bytes", value=moved / GIB, unit="GiB")]
    for key in ours:
        found += [
            Figure(what=key, value=ours[key]),
            Figure(what=f"{key}, the driver's calls alone", value=floor[key]),
            Figure(what=f"{key}, beside them", value=ours[key] - floor[key], target="< 20"),
        ]
    return found


def _cycles(
    scale: Scale, saver: MemorySaver, pool: MHATokenToKVPool, nbytes: int
) -> tuple[dict[str, float], int]:
    """Median milliseconds of a resize to `nbytes` and back, and the bytes that came and went."""
    full = pool.size
    # and the padding page
    half = nbytes // pool.bytes_per_token // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE
    step = _Step(scale, pool)
    whole = saver.report().committed_bytes
    times = Times()
    for _ in times.rounds:
        times("shrink", lambda: pool.resize(half))
        left = saver.report().committed_bytes
        step.check(PAGE_SIZE, pool.size)
        others_write(scale, 0)
        times("grow", lambda: pool.resize(full))
        assert pool.size == full and saver.report().committed_bytes == whole
        step.check(half, full)
    saver.check_integrity()
    return times.medians, whole - left


class _Step:
    """Writes rows through the pool in its first and last layer and reads them back: one graph,
    captured once.
    """

    def __init__(self, scale: Scale, pool: MHATokenToKVPool) -> None:
        self.loc = torch.arange(PAGE_SIZE, PAGE_SIZE + TOKENS, device=scale.device)
        self.rows = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16, device=scale.device)
        self.pool, self.got, self.number = pool, torch.zeros(0, device=scale.device), 0
        self._run = _captured(scale, self._step)

    def _step(self) -> None:
        for layer in (0, LAYERS - 1):
            self.pool.set_kv_buffer(layer, self.loc, self.rows + layer, -self.rows - layer)
        read = [rows for layer in (0, LAYERS - 1) for rows in self.pool.get_rows(layer, self.loc)]
        self.got = torch.stack(read)

    def check(self, first: int, last: int) -> None:
        """A replay that uses slots of both ends of [first, last] gives what it wrote."""
        self.number = self.number % 100 + 1
        ends = [torch.arange(first, first + TOKENS // 2), torch.arange(last - TOKENS // 2, last)]
        self.loc.copy_(torch.cat(ends))
        self.rows.fill_(self.number)
        self._run()
        expected = [self.number, -self.number, self.number + LAYERS - 1, 1 - self.number - LAYERS]
        assert all(
            bool((rows == value).all()) for rows, value in zip(self.got, expected, strict=True)
        )


def _captured(scale: Scale, run: Callable[[], None]) -> Callable[[], None]:
    run()
    if not scale.on_gpu:
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
