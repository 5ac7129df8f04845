"""Pause and resume of the host backend against the kernel's own unmap, without a GPU. `make bench-memory-host`.

Every page is written before each pause, and read back as zero after a resume from the kernel: it was really gone.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from memsaver import MemorySaver
from tests.benchmarks.common import conditions, print_table, save

NBYTES = 1 << 30
REPEATS, WARMUP = 15, 3


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def medians(once: Callable[[], dict[str, float]]) -> dict[str, float]:
    rows = [once() for _ in range(WARMUP + REPEATS)][WARMUP:]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def saver(release: str) -> dict[str, float]:
    owner = MemorySaver("cpu")
    tensor = owner.empty(NBYTES, torch.uint8, tag="kv")

    def once() -> dict[str, float]:
        tensor.fill_(7)
        pause = timed(lambda: owner.pause("kv", release=release))
        resume = timed(lambda: owner.resume("kv"))
        expected = 0 if release == "driver" else 7
        assert bool((tensor[:: mmap.PAGESIZE] == expected).all()), "not the pages that were expected"
        return {"pause": pause, "resume": resume}

    result = medians(once)
    owner.close()
    return result


def kernel() -> dict[str, float]:
    """A memfd of the same size: mapped and written, then unmapped and closed."""

    def make() -> tuple[int, mmap.mmap]:
        file = os.memfd_create("floor")
        os.ftruncate(file, NBYTES)
        return file, mmap.mmap(file, NBYTES)

    def once() -> dict[str, float]:
        started = time.perf_counter()
        file, memory = make()
        resume = (time.perf_counter() - started) * 1e3
        view = torch.frombuffer(memory, dtype=torch.uint8)
        view.fill_(7)
        del view

        def give() -> None:
            memory.close()
            os.close(file)

        return {"pause": timed(give), "resume": resume}

    return medians(once)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {"kernel's own": kernel(), "memsaver, driver": saver("driver"), "memsaver, keep": saver("keep")}
    floor = results["kernel's own"]["pause"]
    print(conditions())
    rows = [[name, row["pause"], row["pause"] / floor, row["resume"]] for name, row in results.items()]
    print_table(["1 GiB, every page written", "pause, ms", "x kernel", "resume, ms"], rows)
    save(args.out, "bench_memory_host", results)


if __name__ == "__main__":
    main()
