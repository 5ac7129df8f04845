"""Pause and resume on one GPU, against torch_memory_saver and the driver's own floor.

`make bench-memory`. The cases check saved content, and that others really used the freed memory.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks import common
from benchmarks.common import GIB, MIB, Case, Figure, Figures, Scale, Times, figures
from benchmarks.rival_tms import in_its_process
from memsaver import MemorySaver
from tests.helpers.peers import Peer

COUNT, TENSOR = 340, 45 * MIB  # 14.9 GiB


def _sizes(scale: Scale) -> tuple[int, int]:
    """Return the number of tensors, and the bytes of each."""
    return scale.choose(COUNT, 3), scale.choose(TENSOR, MIB)


def _make(scale: Scale) -> list[torch.Tensor]:
    count, nbytes = _sizes(scale)
    return [torch.empty(nbytes, dtype=torch.uint8, device=scale.device) for _ in range(count)]


def kept(scale: Scale) -> Figures:
    """Measure retained pages, which another tag maps and overwrites before the resume."""
    saver, times = MemorySaver(scale.device), Times()
    with saver.region("kv"):
        tensors = _make(scale)
    total = saver.report().tags["kv"].committed_bytes
    other = saver.empty(total, torch.uint8, tag="other")
    saver.pause("other")
    for i in times.rounds:
        times("pause", lambda: saver.pause("kv", release="retain"))
        saver.resume("other")
        assert saver.report().pool_bytes == 0, "the other tag must use these pages"
        other.fill_(100 + i)
        saver.pause("other", release="retain")
        times("resume", lambda: saver.resume("kv"))
        assert all(bool((tensor == 100 + i).all()) for tensor in tensors), (
            "not the overwritten pages"
        )
        tensors[0].fill_(1)
    saver.check_integrity()
    del tensors, other
    saver.close()
    return figures(times.medians)


def to_the_driver(written: int | None, scale: Scale) -> Figures:
    """Measure a pause to the driver; `written` bytes go to `others_write` before the resume."""
    count, nbytes = _sizes(scale)
    saver, times = MemorySaver(scale.device), Times()
    tensor = saver.empty(count * nbytes, torch.uint8, tag="kv")
    for _ in times.rounds:
        times("pause", lambda: saver.pause("kv"))
        common.others_write(scale, written)
        times("resume", lambda: saver.resume("kv"))
        tensor.fill_(1)
    del tensor
    saver.close()
    return figures(times.medians)


def driver_floor(written: int | None, scale: Scale) -> Figures:
    count, nbytes = _sizes(scale)
    between = partial(common.others_write, scale, written)
    return figures(
        common.extent_by_driver(scale.device, count * nbytes, "resume", "pause", between)
    )


def rival(written: str, scale: Scale) -> Figures:
    return figures(in_its_process(scale, COUNT, TENSOR, written))


def _other(pipe: Connection, device: torch.device, nbytes: int) -> None:
    saver = MemorySaver(device)
    tensor = saver.empty(2 * MIB, torch.uint8, tag="small")
    theirs = None
    pipe.send(saver.pool_ticket())
    while (ticket := pipe.recv()) is not None:
        if theirs is None:
            theirs = saver.empty(nbytes, torch.uint8, tag="theirs")  # uses the pool
        saver.resume("theirs")
        theirs.fill_(255)
        common.settle()
        saver.pause("theirs", release="hand_over", to=ticket)
        pipe.send(saver.report().committed_bytes)
    del tensor


def handed_over(scale: Scale) -> Figures:
    """Measure a resume with 60 GiB that another process has written and handed over."""
    nbytes = scale.choose(60 * GIB, 8 * MIB)
    saver, times = MemorySaver(scale.device), Times()
    tensor = saver.empty(nbytes, torch.uint8, tag="kv")
    saver.pause(release="retain")  # in one extent; from here on, in pieces
    saver.trim()
    other = Peer(_other, scale.device, nbytes)
    ticket = other.hear(120)
    saver.resume()
    for _ in times.rounds:
        times("hand over", lambda: saver.pause("kv", release="hand_over", to=ticket))
        assert other.ask(saver.pool_ticket(), 60) <= 4 * MIB, "the other process kept some memory"
        times("resume", lambda: saver.resume("kv"))
        assert int(tensor[0]) == int(tensor[-1]) == 255, "not the pages that the process wrote"
        tensor[:: 2 * MIB].fill_(1)
    saver.check_integrity()
    other.tell(None)
    other.dies_within(20)
    del tensor
    saver.close()
    return figures(times.medians)


def through_the_driver(scale: Scale) -> Figures:
    """Measure a resume directly after a tag has written the same memory and released it."""
    saver, times = MemorySaver(scale.device), Times(3)
    tensor = saver.empty(scale.choose(60 * GIB, 8 * MIB), torch.uint8, tag="kv")
    for _ in times.rounds:
        tensor.fill_(255)
        saver.pause("kv")
        times("resume", lambda: saver.resume("kv"))
    del tensor
    saver.close()
    return figures(times.medians)


CASES: dict[str, Case] = {
    "memsaver, kept": kept,
    "torch_memory_saver, freed bytes written": partial(rival, "freed"),
    "memsaver, driver, clean": partial(to_the_driver, 0),
    "torch_memory_saver, clean": partial(rival, "nothing"),
    "driver's floor, clean": partial(driver_floor, 0),
    "memsaver, driver, filled first": partial(to_the_driver, None),
    "torch_memory_saver, filled first": partial(rival, "all"),
    "driver's floor, filled first": partial(driver_floor, None),
    "memsaver, 60 GiB handed over": handed_over,
    "60 GiB through the driver": through_the_driver,
}


def bar(name: str, figure: Figure) -> tuple[str, str] | None:
    """Show pause and resume of 14.9 GiB, without cases that wait for the driver to clear memory."""
    left_out = "filled" in name or "60 GiB" in name or figure.what not in ("pause", "resume")
    return None if left_out else (name, figure.what)


def main(arguments: list[str] | None = None) -> None:
    args = common.parser(__doc__, CASES).parse_args(arguments)
    scale = common.make_scale(args)
    print(f"{COUNT} tensors of {TENSOR // MIB} MiB, no backup, unless said otherwise")
    common.run_cases(
        "bench_memory", {name: partial(CASES[name], scale) for name in args.cases}, args.out, bar
    )


if __name__ == "__main__":
    main()
