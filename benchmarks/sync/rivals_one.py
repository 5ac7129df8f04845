"""Trainer and engine in one process on one GPU: torch's own ways to copy every parameter."""

from __future__ import annotations

import torch

from benchmarks.common import Figures, Run, median_ms
from benchmarks.sync.base import (
    WARMUP,
    Source,
    SyncScale,
    alone,
    check,
    make_source,
    make_target,
    synced,
)


def copies(scale: SyncScale) -> Figures:
    return [figure for source in scale.sources for figure in alone(scale, _copies, scale, source)]


def _copies(scale: SyncScale, source: Source) -> Figures:
    device = scale.place()
    by_name, targets = make_source(source, device), make_target(source, device)
    to, of = list(targets.values()), list(by_name.values())

    def each() -> None:
        for target, tensor in zip(to, of, strict=True):
            target.copy_(tensor)

    graph, found = torch.cuda.CUDAGraph() if scale.on_gpu else None, Figures()
    ways: dict[str, Run] = {"per-tensor copy_": each}
    if graph is not None:
        each()
        with torch.cuda.graph(graph):
            each()
        ways["copy_ in a CUDA graph"] = graph.replay
    ways["_foreach_copy_"] = lambda: torch._foreach_copy_(to, of)
    for name, run in ways.items():
        for target in targets.values():
            target.zero_()
        ms = median_ms(run, scale.repeats, WARMUP, device)
        check(targets, source)
        found += synced(scale, f"{source}: {name}, one process", ms, source.copied)
    return found
