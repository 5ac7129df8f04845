"""The time that the hardware needs to move the same bytes in as few pieces as possible.

They are measured in one process with torch's own copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.common import Figures, measured_copy_rate, median_ms, settle
from benchmarks.sync.base import RANKS, TARGET, WARMUP, SyncScale, alone, moves, synced

WAYS = {  # the part of the first rank's shard that the second rank needs
    "2 shards -> 2 replicas": ("replica", False),
    "2 shards -> TP 2, not aligned": ("tp", False),
    "2 shards -> TP 2, aligned": ("tp", True),
}


def with_rates(scale: SyncScale, gpus: int) -> tuple[SyncScale, Figures]:
    """Measure the rates of this run; return the scale with them, and figures of the link.

    With two GPUs, the rate of the link is that of the largest exchange, in each direction while
    both are used. The figures are of all exchanges at the first source's shapes in bf16.
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
        for name, ms, linked, local in rows
        for figure in synced(scale, name, ms, linked=linked, copied=2 * local)
    ]


def _exchanges(scale: SyncScale) -> list[tuple[str, float, int, int]]:
    """Measure exchanges; return (name, ms, bytes over the link, bytes copied meanwhile) of each."""
    rows = []
    for what, (needs, aligned) in WAYS.items():
        local, linked = (
            n * TARGET.itemsize for n in moves(scale.sources[0].shapes, needs, aligned)
        )
        for copied in (0, local):
            meanwhile = f", {copied / 1e9:.2f} GB copied meanwhile" if copied else ""
            ms = _exchange_ms(scale, linked, copied)
            rows.append((f"{what}: {linked / 1e9:.2f} GB each way{meanwhile}", ms, linked, copied))
    return rows


def _exchange_ms(scale: SyncScale, linked: int, local: int) -> float:
    """Return the ms in which both devices exchange `linked` bytes and copy `local` bytes."""
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
    assert all(bool((target == 7).all()) for target in filled), "not all bytes arrived"
    return ms


def _step(
    origin: torch.device, to: torch.device, nbytes: int, filled: list[Tensor]
) -> Callable[[], object]:
    """Return a copy of `nbytes` on its own streams.

    torch copies on the current stream of the source's device, which waits for the target's: with
    shared streams, the two directions would take turns.
    """
    source = torch.full((nbytes,), 7, dtype=torch.uint8, device=origin)
    target = torch.zeros(nbytes, dtype=torch.uint8, device=to)
    filled.append(target)
    if origin.type != "cuda":
        return lambda: target.copy_(source)
    settle(origin)
    settle(to)
    streams = [torch.cuda.Stream(device) for device in {origin, to}]

    def step() -> None:
        with contextlib.ExitStack() as current:
            for stream in streams:
                current.enter_context(torch.cuda.stream(stream))  # current on its own device only
            target.copy_(source, non_blocking=True)

    return step
