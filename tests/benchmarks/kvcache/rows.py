"""Key and value rows written, moved and read, against the device's copy rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvcache.config import FP4_DTYPE
from kvcache.ops.quant import dequantise_fp4, quantise_fp4, quantise_fp8
from kvcache.pools import MHATokenToKVPool
from tests.benchmarks.common import MIB, Figures, Scale, device_us, share
from tests.benchmarks.kvcache.pools import DIM, PAGE_SIZE, make_pool, shuffled_slots

HEADS = 8
ROW = 2 * HEADS * DIM * 2  # bytes of a token's bf16 key and value in one layer
CHECKED = 1024  # tokens that are compared with a reference


def make(scale: Scale, tokens: int, **changes: Any) -> tuple[MHATokenToKVPool, torch.Tensor]:
    """A pool of twice as many slots, all of them in pages of random order."""
    pool = make_pool(
        scale.device, 2 * tokens, **{"num_layers": 1, "num_kv_heads": HEADS, **changes}
    )
    return pool, shuffled_slots(scale.device, 2 * tokens, 2 * tokens // PAGE_SIZE)


def random_rows(scale: Scale, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    k, v = (
        torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=scale.device) for _ in range(2)
    )
    return k, v


def sizes(scale: Scale, *mibs: int) -> list[tuple[str, int]]:
    """Name and tokens of each size in MiB of bf16 rows."""
    if scale.tiny:
        return [("tiny", 64)]
    return [(f"{mib} MiB", mib * MIB // ROW) for mib in mibs]


def write(scale: Scale) -> Figures:
    """The fused write against one index_copy_ after the other, and against both on two streams."""
    found = []
    for name, tokens in sizes(scale, 1, 256, 1024):
        pool, slots = make(scale, tokens)
        loc, (k, v) = slots[:tokens], random_rows(scale, tokens)
        for way, run in _ways(scale, pool, loc, k, v).items():
            for buffer in pool.get_kv_buffer(0):
                buffer.zero_()
            run()
            got = pool.get_rows(0, loc)
            assert torch.equal(got[0], k) and torch.equal(got[1], v), way
            target = ">= 85" if way == "fused" and tokens * ROW >= 256 * MIB else ""
            found += share(
                scale, f"{name}, {way}", 2 * tokens * ROW, device_us(scale, run, 20), target
            )
    return found


def _ways(
    scale: Scale, pool: MHATokenToKVPool, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, Callable[[], object]]:
    k_buffer, v_buffer = pool.get_kv_buffer(0)

    def serial() -> None:
        k_buffer.index_copy_(0, loc, k)
        v_buffer.index_copy_(0, loc, v)

    ways: dict[str, Callable[[], object]] = {
        "fused": lambda: pool.set_kv_buffer(0, loc, k, v),
        "serial": serial,
    }
    if scale.on_gpu:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()

        def two_streams() -> None:
            side.wait_stream(main)
            k_buffer.index_copy_(0, loc, k)
            with torch.cuda.stream(side):
                v_buffer.index_copy_(0, loc, v)
            main.wait_stream(side)

        ways["two streams"] = two_streams
    return ways


def move(scale: Scale) -> Figures:
    """Pages moved in four layers, against indexing by torch."""
    found, layers = [], 4
    for name, tokens in sizes(scale, 256, 1024):
        count = tokens // layers
        pool, both = make(scale, count, num_layers=layers)
        src, tgt = both[:count], both[count:]
        for layer in range(layers):
            pool.set_kv_buffer(layer, src, *random_rows(scale, count))
        parts = [buffer for layer in range(layers) for buffer in pool.get_kv_buffer(layer)]
        ours = partial(pool.move_kv_cache, tgt, src), ">= 85"
        ways = {
            "move_kv_cache": ours,
            "torch, gather and scatter": (partial(_move_by_torch, parts, tgt, src), ""),
        }
        for way, (run, target) in ways.items():
            for part in parts:
                part.index_fill_(0, tgt, 0)
            run()
            assert all(torch.equal(part[tgt], part[src]) for part in parts), way
            found += share(
                scale, f"{name}, {way}", 2 * count * layers * ROW, device_us(scale, run, 10), target
            )
    return found


def _move_by_torch(parts: list[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor) -> None:
    for part in parts:
        part.index_copy_(0, tgt, part.index_select(0, src))


def quantised(scale: Scale) -> Figures:
    """bf16 rows into fp8 and FP4 pools and back; bytes read and written both counted, as they are
    stored.
    """
    found = []
    for name, dtype in (
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("fp4_e2m1", FP4_DTYPE),
    ):
        for size, tokens in sizes(scale, 256, 1024):
            pool, slots = make(scale, tokens, dtype=dtype)
            loc, rows = slots[:tokens], random_rows(scale, tokens)
            fill, read = partial(pool.set_kv_buffer, 0, loc, *rows), partial(pool.get_rows, 0, loc)
            fill()
            for given, got in zip(rows, read(), strict=True):
                for part in (slice(0, CHECKED), slice(-CHECKED, None)):
                    assert torch.equal(got[part], _rounded(given[part], dtype)), name
            nbytes = tokens * (ROW + pool.bytes_per_token)
            found += share(
                scale, f"{name}, {size}, set_kv_buffer", nbytes, device_us(scale, fill, 20), ">= 70"
            )
            found += share(
                scale, f"{name}, {size}, get_rows", nbytes, device_us(scale, read, 20), ">= 70"
            )
    return found


def _rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What comes back from a pool of this dtype at scale 1, by the definition in torch."""
    if dtype == FP4_DTYPE:
        return dequantise_fp4(*quantise_fp4(rows), rows.dtype)
    return quantise_fp8(rows, torch.ones((), device=rows.device), dtype).to(rows.dtype)
