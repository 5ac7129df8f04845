"""Pause and resume against torch_memory_saver and the driver's own floor, on one GPU. `make bench-memory`.

Every case checks content where content is kept, and that freed memory was really another's in between.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from memsaver import MemorySaver
from memsaver.backends.base import Backend
from tests.benchmarks.common import conditions, free_bytes, median_ms, others_write, print_table, save, timed
from tests.benchmarks.rival_tms import in_its_process

COUNT, MIB = 340, 45  # 14.9 GiB
GIB = 1 << 30
REPEATS = 7


def middle(values: list[float]) -> float:
    return statistics.median(values[2:])


def kept() -> dict[str, float]:
    """Between pause and resume another tag maps the freed pages and overwrites every byte of them."""
    saver = MemorySaver("cuda:0")
    with saver.region("kv"):
        tensors = [torch.empty(MIB << 20, dtype=torch.uint8, device="cuda") for _ in range(COUNT)]
    total = saver.report().tags["kv"].committed_bytes
    other = saver.empty(total, torch.uint8, tag="other")
    saver.pause("other")
    rows: dict[str, list[float]] = {"pause": [], "resume": []}
    for i in range(REPEATS + 2):
        rows["pause"].append(timed(lambda: saver.pause("kv", release="keep")))
        saver.resume("other")
        assert saver.report().pool_bytes == 0, "the other tag has other pages"
        other.fill_(100 + i)
        saver.pause("other", release="keep")
        rows["resume"].append(timed(lambda: saver.resume("kv")))
        assert all(bool((tensor == 100 + i).all()) for tensor in tensors), "not the overwritten pages"
        tensors[0].fill_(1)
    saver.check_integrity()
    del tensors, other
    saver.close()
    return {key: middle(values) for key, values in rows.items()}


def to_the_driver(fill: bool) -> dict[str, float]:
    """fill: another allocation takes and writes all memory first, so that what comes next has to be cleared."""
    saver = MemorySaver("cuda:0")
    tensor = saver.empty(COUNT * MIB << 20, torch.uint8, tag="kv")
    rows: dict[str, list[float]] = {"pause": [], "resume": []}
    for _ in range(REPEATS + 2):
        rows["pause"].append(timed(lambda: saver.pause("kv")))
        others_write(free_bytes() if fill else 0)
        rows["resume"].append(timed(lambda: saver.resume("kv")))
        tensor.fill_(1)
    del tensor
    saver.close()
    return {key: middle(values) for key, values in rows.items()}


def driver_floor(fill: bool) -> dict[str, float]:
    """Unmap and release, create and map, of one extent, by the same calls and nothing else."""
    backend: Backend = MemorySaver("cuda:0")._backend
    nbytes = COUNT * MIB << 20
    address = backend.reserve(nbytes)
    rows: dict[str, list[float]] = {"pause": [], "resume": []}
    handle = [0]

    def take() -> None:
        handle[0] = backend.create(nbytes).handle
        backend.map(address, nbytes, handle[0])
        backend.set_access(address, nbytes)

    def give() -> None:
        backend.unmap(address, nbytes)
        backend.release(handle[0], nbytes)

    take()
    for _ in range(REPEATS + 2):
        rows["pause"].append(timed(give))
        others_write(free_bytes() if fill else 0)
        rows["resume"].append(timed(take))
    give()
    backend.unreserve(address, nbytes)
    return {key: middle(values) for key, values in rows.items()}


def _other(pipe: Connection, nbytes: int) -> None:
    saver = MemorySaver("cuda:0")
    tensor = saver.empty(1 << 21, torch.uint8, tag="small")
    theirs = None
    pipe.send(saver.pool_ticket())
    while (ticket := pipe.recv()) is not None:
        if theirs is None:
            theirs = saver.empty(nbytes, torch.uint8, tag="theirs")  # takes what was handed over
        saver.resume("theirs")
        theirs.fill_(255)
        torch.cuda.synchronize()
        saver.pause("theirs", release="hand_over", to=ticket)
        pipe.send(saver.report().committed_bytes)
    del tensor


def handed_over(gib: int = 60) -> dict[str, float]:
    """The other process writes all of it, then hands it over; timed: the resume here."""
    nbytes = gib * GIB
    saver = MemorySaver("cuda:0")
    tensor = saver.empty(nbytes, torch.uint8, tag="kv")
    saver.pause(release="keep")  # in one extent; from here on in pieces
    saver.trim()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_other, args=(theirs, nbytes), daemon=True)
    process.start()
    ticket = ours.recv()
    saver.resume()
    rows: dict[str, list[float]] = {"hand over": [], "resume": []}
    for _ in range(REPEATS + 2):
        rows["hand over"].append(timed(lambda: saver.pause("kv", release="hand_over", to=ticket)))
        ours.send(saver.pool_ticket())
        assert ours.recv() <= 4 << 20, "the other process kept some"
        rows["resume"].append(timed(lambda: saver.resume("kv")))
        assert int(tensor[0]) == int(tensor[-1]) == 255, "not the pages that it wrote"
        tensor[:: 1 << 21].fill_(1)
    saver.check_integrity()
    ours.send(None)
    process.join(20)
    del tensor
    saver.close()
    return {key: middle(values) for key, values in rows.items()}


def through_the_driver(gib: int = 60) -> float:
    """The same memory, released by a tag that wrote it and resumed at once."""
    saver = MemorySaver("cuda:0")
    tensor = saver.empty(gib * GIB, torch.uint8, tag="kv")
    times = []
    for _ in range(5):
        tensor.fill_(255)
        saver.pause("kv")
        times.append(timed(lambda: saver.resume("kv")))
    del tensor
    saver.close()
    return middle(times)


def allocating() -> dict[str, float]:
    """340 tensors, made and dropped, after warm-up."""
    saver = MemorySaver("cuda:0")

    def make() -> None:
        kept = [torch.empty(MIB << 20, dtype=torch.uint8, device="cuda") for _ in range(COUNT)]
        del kept

    def measured() -> float:
        return median_ms(make, repeats=200, warmup=20)  # a millisecond each: the host's other work shows in few

    before = measured()
    with saver.region("kv"):
        inside = measured()
    after = measured()
    torch.cuda.empty_cache()
    return {"plain torch before": before, "in a region": inside, "plain torch after": after}


def rival(written: str) -> dict[str, float]:
    return in_its_process(COUNT, MIB, REPEATS, written)


CASES = {
    "memsaver, kept": kept,
    "torch_memory_saver, freed bytes written": lambda: rival("freed"),
    "memsaver, driver, clean": lambda: to_the_driver(False),
    "torch_memory_saver, clean": lambda: rival("nothing"),
    "driver's floor, clean": lambda: driver_floor(False),
    "memsaver, driver, filled first": lambda: to_the_driver(True),
    "torch_memory_saver, filled first": lambda: rival("all"),
    "driver's floor, filled first": lambda: driver_floor(True),
    "memsaver, 60 GiB handed over": handed_over,
    "60 GiB through the driver": lambda: {"resume": through_the_driver()},
    "allocating 340 tensors": allocating,
}


def draw(path: Path, results: dict[str, dict[str, float]]) -> None:
    """Pause and resume of the 14.9 GiB; without the cases that wait for the driver to clear memory."""
    from tests.benchmarks.plots import stacked_bars

    whole = {name: row for name, row in results.items() if {"pause", "resume"} <= row.keys()}
    rows = {name: row for name, row in whole.items() if "filled" not in name}
    stacked_bars(path, f"{COUNT} x {MIB} MiB, no backup", rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name in args.cases:
        results[name] = CASES[name]()
        torch.cuda.empty_cache()
        print(name, {key: round(value, 2) for key, value in results[name].items()}, flush=True)
    print(conditions())
    rows = [[name, key, value] for name, row in results.items() for key, value in row.items()]
    print_table([f"{COUNT} x {MIB} MiB unless said otherwise", "operation", "ms"], rows)
    save(args.out, "bench_memory", results)
    if args.out is not None:
        draw(args.out / "bench_memory.png", results)


if __name__ == "__main__":
    main()
