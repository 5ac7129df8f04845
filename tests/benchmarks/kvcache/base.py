"""What the cases of `bench_kvcache.py` share: where and how large they run, what they report, the device's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.common import copy_bandwidth

MIB, GIB = 1 << 20, 1 << 30
REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class Scale:
    """tiny: sizes that the interpreter gets through, so that a test can run the script; its times mean nothing.

    bandwidth: bytes a second of the same run's device copy, read and written bytes both counted.
    out: folder for what a case keeps beside its figures.
    """

    device: torch.device
    tiny: bool
    bandwidth: float
    out: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def choose(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


@dataclass(frozen=True, kw_only=True)
class Figure:
    what: str
    value: float
    unit: str
    target: str = ""


def make_scale(device: str, tiny: bool, out: Path | None = None) -> Scale:
    where = torch.device(device)
    bandwidth = 1e9  # the CPU has no such figure
    if where.type == "cuda":
        bandwidth = copy_bandwidth(MIB) if tiny else copy_bandwidth()
        torch.cuda.empty_cache()
    return Scale(device=where, tiny=tiny, bandwidth=bandwidth, out=out)


def share(scale: Scale, what: str, nbytes: int, us: float, target: str = "") -> list[Figure]:
    """Time and share of the copy rate of an operation that reads and writes `nbytes` together."""
    return [
        Figure(what=what, value=us, unit="us"),
        Figure(what=what, value=100 * nbytes / (us / 1e6) / scale.bandwidth, unit="% of copy", target=target),
    ]


def host_us(run: Callable[[], object], before: Callable[[], object] = lambda: None, repeats: int = 50) -> float:
    """Median time of `run` on the host in microseconds; `before` is called before each and not counted."""
    times = []
    for _ in range(repeats + 5):
        before()
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[5:])


def elapsed_ms(scale: Scale, run: Callable[[], object]) -> float:
    """Milliseconds of `run`, from an idle device to an idle device."""
    if scale.on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if scale.on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of each row, the first two values left out."""
    return {key: statistics.median(values[2:]) for key, values in times.items()}


def device_us(scale: Scale, run: Callable[[], object], launches: int = 25) -> float:
    """Time that one `run` takes on the device in microseconds, the median of several rounds of `launches` runs.

    The runs queue up behind a sleeping kernel, so that no time of the host lies between them. RuntimeError if they
    never queue up: `run` waits for the device, or launches more than the queue holds.
    """
    if not scale.on_gpu:
        return elapsed_ms(scale, run) * 1e3  # once: the interpreter is slow, and its times mean nothing
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    cycles = 20_000_000  # 10 ms at 2 GHz, more where the clock is slower
    while len(times) < REPEATS:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(launches):
            run()
        queued = not start.query()
        end.record()
        end.synchronize()
        if queued:
            times.append(start.elapsed_time(end) * 1e3 / launches)
        elif (cycles := 2 * cycles) > 10_000_000_000:
            raise RuntimeError("the runs do not queue up on the device: they wait for it, or are too many")
    return statistics.median(times)


def check_no_wait(scale: Scale, run: Callable[[], object]) -> None:
    """AssertionError or RuntimeError if `run` waits for the device, which is kept busy meanwhile. Warm it up before."""
    if not scale.on_gpu:
        run()
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # 0.2 s
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query(), "the call came back after the device was done: it waited"
    torch.cuda.synchronize()


def shuffled_slots(scale: Scale, tokens: int, page_size: int, pages: int) -> torch.Tensor:
    """Slots int64 `[tokens]` of whole pages out of 1..pages in random order."""
    chosen = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[: tokens // page_size] + 1
    slots = chosen[:, None] * page_size + torch.arange(page_size)
    return slots.flatten().to(scale.device)
