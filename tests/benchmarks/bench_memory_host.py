"""Pause and resume of the host backend against the kernel's own unmap, without a GPU. `make
bench-memory-host`.

Every page is written before each pause, and read back as zero after a resume from the kernel: it
was really gone.
"""

from __future__ import annotations

import mmap
import os
from functools import partial

import torch

from memsaver import MemorySaver
from tests.benchmarks.common import GIB, MIB, Figures, Times, figures, parser, run_cases

REPEATS, WARMUP = 15, 3


def saver(release: str, nbytes: int) -> Figures:
    owner, times = MemorySaver("cpu"), Times(REPEATS, WARMUP)
    tensor = owner.empty(nbytes, torch.uint8, tag="kv")
    for _ in times.rounds:
        tensor.fill_(7)
        times("pause", lambda: owner.pause("kv", release=release))
        times("resume", lambda: owner.resume("kv"))
        expected = 0 if release == "driver" else 7
        assert bool((tensor[:: mmap.PAGESIZE] == expected).all()), (
            "not the pages that were expected"
        )
    owner.close()
    return figures(times.medians)


def kernel(nbytes: int) -> Figures:
    """A memfd of the same size: mapped and written, then unmapped and closed."""
    times = Times(REPEATS, WARMUP)
    held: list[tuple[mmap.mmap, int]] = []

    def make() -> None:
        file = os.memfd_create("floor")
        os.ftruncate(file, nbytes)
        held.append((mmap.mmap(file, nbytes), file))

    def give() -> None:
        memory, file = held.pop()
        memory.close()
        os.close(file)

    for _ in times.rounds:
        times("resume", make)
        torch.frombuffer(held[0][0], dtype=torch.uint8).fill_(7)
        times("pause", give)
    return figures(times.medians)


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(arguments)
    nbytes = MIB if args.tiny else GIB
    print(f"{nbytes / GIB:.3g} GiB, every page written")
    cases = {
        "kernel's own": kernel,
        "memsaver, driver": partial(saver, "driver"),
        "memsaver, keep": partial(saver, "retain"),
    }
    run_cases(
        "bench_memory_host", {name: partial(case, nbytes) for name, case in cases.items()}, args.out
    )


if __name__ == "__main__":
    main()
