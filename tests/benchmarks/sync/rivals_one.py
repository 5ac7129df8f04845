"""Trainer and engine in one process on one GPU: torch's own ways to copy every parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.benchmarks.common import Figures, median_ms, settle
from tests.benchmarks.sync.base import WARMUP, Source, SyncScale, alone, check, make_source, make_target, synced

Way = Callable[[list[Tensor], list[Tensor]], Callable[[], object]]
"""(targets, sources) -> what copies all."""


def copies(scale: SyncScale) -> Figures:
    return [figure for source in scale.sources for figure in alone(scale, _copies, scale, source)]


def _copies(scale: SyncScale, source: Source) -> Figures:
    device = scale.place()
    sources, targets = make_source(source, device), make_target(source, device)
    found = []
    for name, way in WAYS.items():
        if way is _graph and not scale.on_gpu:
            continue
        for target in targets.values():
            target.zero_()
        settle(device)
        run = way(list(targets.values()), list(sources.values()))
        ms = median_ms(run, scale.repeats, WARMUP, device)
        check(targets, source)
        found += synced(scale, f"{source}: {name}, one process", ms, source.copied)
    return found


def _per_tensor(targets: list[Tensor], sources: list[Tensor]) -> Callable[[], object]:
    def run() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return run


def _graph(targets: list[Tensor], sources: list[Tensor]) -> Callable[[], object]:
    run = _per_tensor(targets, sources)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _foreach(targets: list[Tensor], sources: list[Tensor]) -> Callable[[], object]:
    return lambda: torch._foreach_copy_(targets, sources)


WAYS: dict[str, Way] = {
    "per-tensor copy_": _per_tensor,
    "copy_ in a CUDA graph": _graph,
    "_foreach_copy_": _foreach,
}
