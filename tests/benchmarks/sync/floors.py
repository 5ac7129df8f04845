"""Floors: what the hardware takes to move as many bytes in as few pieces as can be. One process, torch's own copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from tests.benchmarks.sync.base import TARGET, Figure, Rates, Scale, median_ms, settle
from tests.benchmarks.sync.processes import alone
from tests.benchmarks.sync.shapes import moves

COPY_BYTES = 4 << 30  # of the copy that gives the rate, as in all of the project's floors


def rates(scale: Scale, gpus: int) -> tuple[Rates, list[Figure]]:
    """Rates of the run, and one large copy or cast of each source; with two GPUs also what the link takes."""
    copy, figures = alone(_one_device, scale, seconds=scale.seconds)
    if gpus < 2:
        return Rates(copy=copy), figures
    link, linked = alone(_two_devices, scale, seconds=scale.seconds)
    return Rates(copy=copy, link=link), figures + linked


def _one_device(scale: Scale) -> tuple[float, list[Figure]]:
    """(bytes a second read and written by one large copy, figures)."""
    rate = _copy_rate(scale)
    return rate, [_large(scale, each.dtype, each.params) for each in scale.sources]


def _copy_rate(scale: Scale) -> float:
    device = scale.device()
    nbytes = 1 << 16 if scale.tiny else COPY_BYTES
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    ms = median_ms(scale, device, lambda: target.copy_(source))
    assert torch.equal(source, target)
    return 2 * nbytes / (ms / 1e3)


def _large(scale: Scale, dtype: str, params: int) -> Figure:
    """One call of torch for the whole model."""
    device = scale.device()
    if scale.on_gpu:
        torch.cuda.empty_cache()
    source = torch.ones(params, dtype=getattr(torch, dtype), device=device)
    target = torch.zeros(params, dtype=TARGET, device=device)
    ms = median_ms(scale, device, lambda: target.copy_(source))
    assert bool((target == 1).all())
    copied = params * (source.element_size() + target.element_size())
    return Figure(what=f"one large copy_, {dtype} -> bfloat16, {params / 1e9:.2f} G", ms=ms, copied=copied)


# ---------------------------------------------------------------- two GPUs


def _two_devices(scale: Scale) -> tuple[float, list[Figure]]:
    """(bytes a second over the link in each of both directions at once, figures); the first source's shapes in bf16."""
    figures, link = [], 0.0
    for what, needs, aligned in (
        ("2 shards -> 2 replicas", "replica", False),
        ("2 shards -> TP 2, not aligned", "tp", False),
        ("2 shards -> TP 2, aligned", "tp", True),
    ):
        local, linked = (n * TARGET.itemsize for n in moves(scale.sources[0].shapes, 2, needs, aligned))
        for beside in (0, local):
            ms = exchange_ms(scale, linked, beside)
            link = link or linked / (ms / 1e3)  # of the first, the largest
            name = f"{what}: {linked / 1e9:.2f} GB each way" + (
                f", {beside / 1e9:.2f} GB copied meanwhile" if beside else ""
            )
            figures.append(Figure(what=name, ms=ms, linked=linked, copied=2 * beside))
    return link, figures


def exchange_ms(scale: Scale, linked: int, local: int) -> float:
    """Both devices take `linked` bytes in from one another, all at once, and copy `local` bytes beside."""
    devices = [scale.device(0), scale.device(1)]
    if scale.on_gpu:
        torch.cuda.empty_cache()
    steps: list[Callable[[], object]] = []
    filled: list[Tensor] = []
    for mine, theirs in ((0, 1), (1, 0)):
        steps.append(_step(devices[theirs], devices[mine], linked, filled))
        steps.append(_step(devices[mine], devices[mine], local, filled))

    def run() -> None:
        for step in steps:
            step()
        settle(devices[1])

    ms = median_ms(scale, devices[0], run)
    for device in devices:
        settle(device)
    assert all(bool((target == 7).all()) for target in filled), "not all bytes came"
    return ms


def _step(of: torch.device, to: torch.device, nbytes: int, filled: list[Tensor]) -> Callable[[], object]:
    """A copy of `nbytes` on streams of its own. torch copies on the current stream of the source's device, and has it
    wait for the target's: with streams shared, the two directions would take turns."""
    source = torch.full((nbytes,), 7, dtype=torch.uint8, device=of)
    target = torch.zeros(nbytes, dtype=torch.uint8, device=to)
    filled.append(target)
    if of.type != "cuda":
        return lambda: target.copy_(source)
    settle(of)
    settle(to)
    streams = [torch.cuda.Stream(device) for device in {of, to}]

    def step() -> None:
        with contextlib.ExitStack() as current:
            for stream in streams:
                current.enter_context(torch.cuda.stream(stream))  # of its device alone
            target.copy_(source, non_blocking=True)

    return step
