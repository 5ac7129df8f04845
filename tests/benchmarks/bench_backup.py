"""Kept content: to the host and back, clean tags, swap, disk; against torch_memory_saver and the copy rate itself.

`make bench-backup`. Every case checks the content that comes back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memsaver import MemorySaver
from tests.benchmarks.common import Sampler, conditions, others_write, print_table, save, timed
from tests.benchmarks.rival_tms import in_its_process

COUNT, MIB = 182, 45  # 8 GiB
GIB, MEGA = 1 << 30, 1 << 20
REPEATS, WARMUP = 5, 2


def cycles(
    pause: Callable[[], object], resume: Callable[[], object], between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    rows = []
    for _ in range(WARMUP + REPEATS):
        away = timed(pause)
        between()
        rows.append((away, timed(resume)))
    return {
        "first pause": rows[0][0],
        "pause": statistics.median(row[0] for row in rows[WARMUP:]),
        "resume": statistics.median(row[1] for row in rows[WARMUP:]),
    }


def floor(nbytes: int = 8 * GIB) -> dict[str, float]:
    """One copy of as many bytes between pinned memory and the device, alone and both ways at once."""
    host = torch.empty(nbytes // 2, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    other_host, other = torch.empty_like(host, pin_memory=True), torch.empty_like(device)
    inward = torch.cuda.Stream()

    def both() -> None:
        host.copy_(device, non_blocking=True)
        with torch.cuda.stream(inward):
            other.copy_(other_host, non_blocking=True)

    def median(run: Callable[[], object]) -> float:
        return statistics.median([timed(run) for _ in range(WARMUP + REPEATS)][WARMUP:])

    return {
        "pause": 2 * median(lambda: host.copy_(device, non_blocking=True)),
        "resume": 2 * median(lambda: device.copy_(host, non_blocking=True)),
        "both, each way": 2 * median(both),
    }


def tensors_of(saver: MemorySaver, count: int = COUNT, content: str = "host") -> list[torch.Tensor]:
    with saver.region("params", content=content):
        made = [torch.empty(MIB << 20, dtype=torch.uint8, device="cuda") for _ in range(count)]
    for number, tensor in enumerate(made):
        tensor.fill_(number % 251)
        tensor[-1] = 255 - number % 251
    return made


def check(made: list[torch.Tensor]) -> None:
    for number, tensor in enumerate(made):
        assert bool((tensor[:-1] == number % 251).all()) and int(tensor[-1]) == 255 - number % 251


def to_the_host(release: str, between: Callable[[], object] = lambda: None) -> dict[str, float]:
    """between: pause and resume. "first pause": with nothing pinned."""
    saver = MemorySaver("cuda:0")
    made = tensors_of(saver)
    saver.host_arena.trim()
    pause, resume = partial(saver.pause, "params", release=release), partial(saver.resume, "params")
    row = cycles(pause, resume, between)
    check(made)
    row["pinned, MiB"] = saver.host_arena.committed_bytes / MEGA
    del made
    saver.close()
    return row


def clean() -> dict[str, float]:
    saver = MemorySaver("cuda:0")
    made = tensors_of(saver)

    def pause() -> None:
        saver.mark_clean("params", 1)
        saver.pause("params", release="keep")

    pause()  # compiles the digest's kernel
    saver.resume("params")
    row = cycles(pause, lambda: saver.resume("params"))
    del row["first pause"]
    before = saver.statistics()["copy"].nbytes
    pause()
    row["bytes copied"] = float(saver.statistics()["copy"].nbytes - before)
    saver.resume("params")
    check(made)
    del made
    saver.close()
    return row


def half_freed() -> dict[str, float]:
    saver = MemorySaver("cuda:0")
    made = tensors_of(saver)[::2]
    live = saver.report().tags["params"].live_bytes
    saver.pause("params", release="keep")
    copied = saver.statistics()["copy"].nbytes
    saver.resume("params")
    for number, tensor in enumerate(made):
        assert int(tensor[0]) == 2 * number % 251
    del made
    saver.close()
    return {"live bytes": float(live), "bytes copied": float(copied)}


def many_cycles(count: int = 200) -> dict[str, float]:
    """Pinned bytes after the first and the last of them, 1 GiB in 22 tensors."""
    saver = MemorySaver("cuda:0")
    made = tensors_of(saver, 22)
    pinned = []
    for _ in range(count):
        saver.pause("params")
        pinned.append(saver.host_arena.committed_bytes / MEGA)
        saver.resume("params")
    check(made)
    del made
    saver.close()
    return {"pinned after 1, MiB": pinned[0], f"pinned after {count}, MiB": pinned[-1]}


def swap(gib: int = 16) -> dict[str, float]:
    """Against pause and then resume of the same tags; the device's used memory is sampled during more swaps."""
    saver = MemorySaver("cuda:0")
    one = saver.empty(gib * GIB, torch.uint8, tag="one", content="host").fill_(1)
    saver.pause("one")
    two = saver.empty(gib * GIB, torch.uint8, tag="two", content="host").fill_(2)
    for _ in range(2):  # from here on in pieces
        saver.swap(pause="two", resume="one")
        saver.swap(pause="one", resume="two")

    def serial(away: str, back: str) -> None:
        saver.pause(away, release="keep")
        saver.resume(back)

    turns = [("two", "one"), ("one", "two")] * 3
    in_turn = [timed(lambda a=a, b=b: serial(a, b)) for a, b in turns]
    saver.trim()
    swapped = [timed(lambda a=away, b=back: saver.swap(pause=a, resume=b)) for away, back in turns]
    with Sampler() as sampler:
        for away, back in turns:
            saver.swap(pause=away, resume=back)
    assert int(two[0]) == int(two[-1]) == 2 and bool((two[:: 1 << 20] == 2).all())
    saver.swap(pause="two", resume="one")
    assert bool((one[:: 1 << 20] == 1).all())
    del one, two
    saver.close()
    serial_ms, swap_ms = statistics.median(in_turn[2:]), statistics.median(swapped[2:])
    extra = sampler.rise / MEGA
    return {"in turn": serial_ms, "swap": swap_ms, "swap / in turn": swap_ms / serial_ms, "extra, MiB": extra}


def disk(directory: Path, rounds: int = 3) -> dict[str, float]:
    """Medians of rounds in turn with `dd`: a lent machine's drive changes its speed from second to second."""
    saver = MemorySaver("cuda:0", disk_dir=directory)
    made = tensors_of(saver, content="disk")
    rows = []
    for _ in range(1 + rounds):
        write, read = dd(directory)
        rows.append({"dd writes": write, "pause": timed(lambda: saver.pause("params")), "dd reads": read})
        rows[-1]["resume"] = timed(lambda: saver.resume("params"))
    check(made)
    del made
    saver.close()
    return {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}


def dd(directory: Path) -> tuple[float, float]:
    """Milliseconds of `dd` with direct I/O for as many bytes, their space reserved before as ours is."""
    file, count = directory / "memsaver-dd", COUNT * MIB // 15
    out = ["dd", "if=/dev/zero", f"of={file}", "bs=15M", f"count={count}", "oflag=direct", "conv=notrunc"]
    back = ["dd", f"if={file}", "of=/dev/null", "bs=15M", "iflag=direct"]
    try:
        with file.open("wb") as handle:
            os.posix_fallocate(handle.fileno(), 0, COUNT * MIB << 20)
        times = []
        for command in (out, back):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times.append((time.perf_counter() - started) * 1e3)
        return times[0], times[1]
    finally:
        file.unlink(missing_ok=True)


def draw(path: Path, results: dict[str, dict[str, float]]) -> None:
    from tests.benchmarks.plots import stacked_bars

    keys, left_out = ("pause", "resume"), ("disk", "torch_memory_saver")  # seconds
    rows = {name: row for name, row in results.items() if row.keys() >= set(keys) and name not in left_out}
    stacked_bars(path, "8 GiB kept over a pause", {name: {key: row[key] for key in keys} for name, row in rows.items()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    rival = partial(in_its_process, COUNT, MIB, REPEATS, "freed", "backup")
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "pinned copy": floor,
        "host, extents kept": lambda: to_the_host("keep"),
        "host, extents to the driver, resumed at once": lambda: to_the_host("driver"),
        "the same, resumed a second later": lambda: to_the_host("driver", lambda: others_write(0)),
        "the same, written by others meanwhile": lambda: to_the_host("driver", lambda: others_write(COUNT * MIB << 20)),
        "torch_memory_saver, retain_cpu_backup": lambda: in_its_process(
            COUNT, MIB, REPEATS, "freed", "backup", "retain"
        ),
        "torch_memory_saver": rival,
        "marked clean": clean,
        "half of the blocks freed": half_freed,
        "200 cycles": many_cycles,
        "swap 16 GiB": swap,
        "disk": lambda: disk(args.disk),
    }
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in args.cases:
        results[name] = cases[name]()
        torch.cuda.empty_cache()
        print(name, {key: round(value, 2) for key, value in results[name].items()}, flush=True)
    print(conditions())
    print_table(
        [f"{COUNT} x {MIB} MiB (8 GiB) unless said otherwise", "what", "ms (or as named)"],
        [[name, key, value] for name, row in results.items() for key, value in row.items()],
    )
    save(args.out, "bench_backup", results)
    if args.out is not None:
        draw(args.out / "bench_backup.png", results)


if __name__ == "__main__":
    main()
