"""A pool that shrinks and grows by 10 GiB under a captured graph, beside the driver's own calls for the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvcache import KVCacheConfig, MHATokenToKVPool
from memsaver import MemorySaver
from tests.benchmarks.kvcache.base import GIB, MIB, REPEATS, Figure, Scale, elapsed_ms, medians

PAGE_SIZE, LAYERS = 16, 28  # the Qwen2.5-7B shape: 56 KiB a token
TOKENS = 64  # that the graph writes and reads


def resize(scale: Scale) -> list[Figure]:
    nbytes = 10 * MIB if scale.tiny else 10 * GIB
    saver = MemorySaver(scale.device)
    ours, moved = _cycles(scale, saver, _pool(scale, saver, 2 * nbytes), nbytes)
    saver.close()
    assert scale.tiny or moved >= nbytes, "less was given back than asked for"
    floor = _floor(scale, moved)
    figures = [Figure(what="bytes", value=moved / GIB, unit="GiB")]
    for key in ours:
        figures += [
            Figure(what=key, value=ours[key], unit="ms"),
            Figure(what=f"{key}, the driver's calls alone", value=floor[key], unit="ms"),
            Figure(what=f"{key}, beside them", value=ours[key] - floor[key], unit="ms", target="< 20"),
        ]
    return figures


def _cycles(scale: Scale, saver: MemorySaver, pool: MHATokenToKVPool, nbytes: int) -> tuple[dict[str, float], int]:
    """Median milliseconds of a resize to `nbytes` and back, and the bytes that came and went."""
    full, half = pool.size, nbytes // pool.bytes_per_token // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE  # and the padding page
    step = _Step(scale, pool)
    whole = saver.report().committed_bytes
    times: dict[str, list[float]] = {"shrink": [], "grow": []}
    for _ in range(REPEATS + 2):
        times["shrink"].append(elapsed_ms(scale, lambda: pool.resize(half)))
        left = saver.report().committed_bytes
        step.check(PAGE_SIZE, pool.size)
        _settle(scale)
        times["grow"].append(elapsed_ms(scale, lambda: pool.resize(full)))
        assert pool.size == full and saver.report().committed_bytes == whole
        step.check(half, full)
    saver.check_integrity()
    return medians(times), whole - left


def _pool(scale: Scale, saver: MemorySaver, nbytes: int) -> MHATokenToKVPool:
    shape = {"num_kv_heads": 4, "head_dim": 128, "dtype": torch.bfloat16, "page_size": PAGE_SIZE}
    row = LAYERS * 2 * 4 * 128 * 2
    size = nbytes // row // PAGE_SIZE * PAGE_SIZE
    config = KVCacheConfig(num_layers=LAYERS, size=size, device=scale.device, slot_major=True, **shape)  # type: ignore[arg-type]
    return MHATokenToKVPool(config, saver)


class _Step:
    """Writes rows through the pool in its first and last layer and reads them back: one graph, captured once."""

    def __init__(self, scale: Scale, pool: MHATokenToKVPool) -> None:
        self.loc = torch.arange(PAGE_SIZE, PAGE_SIZE + TOKENS, device=scale.device)
        self.rows = torch.zeros(TOKENS, 4, 128, dtype=torch.bfloat16, device=scale.device)
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
        assert all(bool((rows == value).all()) for rows, value in zip(self.got, expected, strict=True))


def _captured(scale: Scale, run: Callable[[], None]) -> Callable[[], None]:
    run()
    if not scale.on_gpu:
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _floor(scale: Scale, nbytes: int) -> dict[str, float]:
    """Create and map, unmap and release, of one extent, by the same calls and nothing else."""
    saver = MemorySaver(scale.device)
    backend = saver._backend
    address = backend.reserve(nbytes)
    handle = [0]

    def grow() -> None:
        handle[0] = backend.create(nbytes).handle
        backend.map(address, nbytes, handle[0])
        backend.set_access(address, nbytes)

    def shrink() -> None:
        backend.unmap(address, nbytes)
        backend.release(handle[0], nbytes)

    times: dict[str, list[float]] = {"shrink": [], "grow": []}
    for _ in range(REPEATS + 2):
        times["grow"].append(elapsed_ms(scale, grow))
        times["shrink"].append(elapsed_ms(scale, shrink))
        _settle(scale)
    backend.unreserve(address, nbytes)
    saver.close()
    return medians(times)


def _settle(scale: Scale) -> None:
    """The driver clears what was released meanwhile, else the next create waits for it."""
    time.sleep(1.0 if scale.on_gpu and not scale.tiny else 0.0)
