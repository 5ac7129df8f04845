"""Floors: what the hardware takes to move as many bytes in as few pieces as can be.

One process, torch's own copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.common import Figures, measured_copy_rate, median_ms, settle
from benchmarks.sync.base import RANKS, TARGET, WARMUP, SyncScale, alone, moves, synced

WAYS = {  # what the second of two ranks needs of the first one's shard
    "2 shards -> 2 replicas": ("replica", False),
    "2 shards -> TP 2, not aligned": ("tp", False),
    "2 shards -> TP 2, aligned": ("tp", True),
}


def with_rates(scale: SyncScale, gpus: int) -> tuple[SyncScale, Figures]:
    """Rates of the run; with two GPUs also what the link takes: bytes a second in each of both
    directions at once, of the largest exchange, and figures of all of them at the first source's
    shapes in bf16.
    """
    scale = replace(scale, copy_rate=alone(scale, measured_copy_rate, scale))
    print(f"copy of 4 GiB: {scale.copy_rate / 1e12:.2f} TB/s, read and write counted")
    if gpus < RANKS:
        return scale, []
    rows: list[tuple[str, float, int, int]] = alone(scale, _exchanges, scale)
    _, ms, linked, _ = rows[0]
    scale = replace(scale, link_rate=linked / (ms / 1e3))
    print(f"link: {scale.link_rate / 1e9:.0f} GB/s each way")
    return scale, [
        figure
        for name, ms, linked, beside in rows
        for figure in synced(scale, name, ms, linked=linked, copied=2 * beside)
    ]


def _exchanges(scale: SyncScale) -> list[tuple[str, float, int, int]]:
    """(name, ms, bytes over the link, bytes copied beside)"""
    rows = []
    for what, (needs, aligned) in WAYS.items():
        local, linked = (
            n * TARGET.itemsize for n in moves(scale.sources[0].shapes, needs, aligned)
        )
        for beside in (0, local):
            meanwhile = f", {beside / 1e9:.2f} GB copied meanwhile" if beside else ""
            ms = _exchange_ms(scale, linked, beside)
            rows.append((f"{what}: {linked / 1e9:.2f} GB each way{meanwhile}", ms, linked, beside))
    return rows


def _exchange_ms(scale: SyncScale, linked: int, local: int) -> float:
    """Both devices take `linked` bytes in from one another, all at once, and copy `local` bytes
    beside.
    """
    devices = [scale.place(rank) for rank in range(RANKS)]
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

    ms = median_ms(run, scale.repeats, WARMUP, devices[0])
    for device in devices:
        settle(device)
    assert all(bool((target == 7).all()) for target in filled), "not all bytes came"
    return ms


def _step(
    of: torch.device, to: torch.device, nbytes: int, filled: list[Tensor]
) -> Callable[[], object]:
    """A copy of `nbytes` on streams of its own. torch copies on the current stream of the source's
    device, and has it wait for the target's: with streams shared, the two directions would take
    turns.
    """
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
