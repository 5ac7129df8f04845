"""Rates between the tiers: `python -m tests.benchmarks.bench_tiers [--device cuda:0] [--dir DIR]`.

A pool of Qwen2.5-7B's shape; pages of 16 tokens, scattered on both sides. Host: all layers out, all layers in, one call
a layer in, beside one plain copy of as many bytes. Disk: one thread, put and get.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcache import KVCacheConfig, MHATokenToKVPool
from kvcache.tiers import DiskTier, HostCacheConfig, HostKVCache, page_hashes
from tests.benchmarks.common import conditions, print_table

GIB = 1 << 30
ROUNDS = 7


def rate(nbytes: int, device: str, work: Callable[[], Any]) -> str:
    """Median GiB/s, the first round left out."""
    seconds = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return f"{nbytes / GIB / statistics.median(seconds[1:]):.2f}"


def host_rows(device: str, pages: int, copied: int) -> list[list[str]]:
    config = KVCacheConfig(
        num_layers=28, num_kv_heads=4, head_dim=128, size=16 * pages, page_size=16, dtype=torch.bfloat16, device=device
    )
    pool, rows = MHATokenToKVPool(config), []
    nbytes = copied * 16 * config.bytes_per_token
    for layout in ("layer_first", "page_first"):
        cache = HostKVCache(pool, HostCacheConfig(ratio=1.0, layout=layout))
        held = cache.allocator.alloc_pages(pages)
        assert held is not None
        scattered = [1 + torch.randperm(pages)[:copied].numpy() for _ in range(2)]
        slots = cache.slots_of(scattered[0]), cache.slots_of(scattered[1]).to(device)
        one = range(28)
        rows.append([
            layout,
            rate(nbytes, device, lambda: cache.backup_from_device_all_layer(*slots)),  # noqa: B023
            rate(nbytes, device, lambda: cache.load_to_device(*slots)),  # noqa: B023
            rate(nbytes, device, lambda: [cache.load_to_device_per_layer(*slots, i) for i in one]),  # noqa: B023
        ])  # fmt: skip
    flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
    there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    copies = [rate(nbytes, device, lambda: there.copy_(flat, non_blocking=True))]
    copies.append(rate(nbytes, device, lambda: flat.copy_(there, non_blocking=True)))
    return [*rows, ["one plain copy", *copies, ""]]


def disk_rates(directory: Path | None, pages: int, page_bytes: int) -> list[str]:
    page, keys = torch.randint(0, 256, (page_bytes,), dtype=torch.uint8), page_hashes(range(pages), 1)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        disk = DiskTier(Path(folder), 2 * pages * page_bytes, page_bytes=page_bytes, format="", owner="benchmark")
        begin = time.perf_counter()
        for key in keys:
            disk.put(key, page)
        middle = time.perf_counter()
        for key in keys:
            assert disk.get(key, page)
        end = time.perf_counter()
    return [f"{pages * page_bytes / GIB / seconds:.2f}" for seconds in (middle - begin, end - middle)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    pages = 4096 if options.device != "cpu" else 256
    print(conditions())
    heads = ["GiB/s", "out, all layers", "in, all layers", "in, layer by layer"]
    print_table(heads, host_rows(options.device, pages, pages // 2))
    print_table(["GiB/s", "put", "get"], [["disk, 0.9 MiB a page", *disk_rates(options.dir, 300, 28 * 16 * 2048)]])


if __name__ == "__main__":
    main()
