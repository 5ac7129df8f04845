"""A profiler's trace of one step of an engine with loads: which layer each kernel is of, and what
ran at the same time.

Told by kernels: a load is one launch a layer. Compute has a norm before the first layer and two in
each, the second of which is the next layer's first (no norms of query and key heads).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.common import Figure, Figures

LOAD, NORM = "copy_rows_kernel", "_rms_norm"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """start, end: milliseconds from the first kernel of the trace."""

    layer: int
    start: float
    end: float


def record(run: Callable[[], object], path: Path) -> None:
    """Profiles what `run` does on the GPU; Chrome's format."""
    from torch.profiler import ProfilerActivity, profile

    # the first profile sets the profiler up
    for each in (lambda: torch.zeros(1, device="cuda"), run):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            each()
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def read(path: Path, layers: int) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of loads, one a layer, and of the compute in layers; ValueError where they are not
    those of one step.
    """
    events = [
        each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == "kernel"
    ]
    events.sort(key=lambda each: each["ts"])
    loads = [each for each in events if each["name"].startswith(LOAD)]
    norms = [each for each in events if each["name"].startswith(NORM)]
    if len(loads) != layers or len(norms) != 2 * layers + 1:
        names = sorted({each["name"][:40] for each in events})
        raise ValueError(
            f"{path}: {len(loads)} kernels {LOAD} and {len(norms)} {NORM} are not those of one "
            f"step of {layers} layers with one load; there are {names}"
        )

    def kernel(event: dict[str, float], layer: int) -> Kernel:
        start = (event["ts"] - events[0]["ts"]) / 1e3
        return Kernel(layer=layer, start=start, end=start + event["dur"] / 1e3)

    computes, passed = [], 0
    for event in (each for each in events if each["args"]["stream"] == norms[0]["args"]["stream"]):
        if passed and (passed - 1) // 2 < layers:
            computes.append(kernel(event, (passed - 1) // 2))
        passed += event["name"].startswith(NORM)
    return [kernel(event, layer) for layer, event in enumerate(loads)], computes


def beside(loads: Sequence[Kernel], computes: Sequence[Kernel]) -> list[set[int]]:
    """For each load the earlier layers of which a kernel ran meanwhile."""
    return [
        {
            each.layer
            for each in computes
            if each.layer < load.layer and each.start < load.end and load.start < each.end
        }
        for load in loads
    ]


def figures(loads: Sequence[Kernel], computes: Sequence[Kernel]) -> Figures:
    """First of all: how many layers were loaded while an earlier one was computed.

    The first has none before it.
    """
    both = [*loads, *computes]
    load, compute = (
        sum(each.end - each.start for each in kernels) for kernels in (loads, computes)
    )
    whole = max(each.end for each in both) - min(each.start for each in both)
    count, unit = sum(map(bool, beside(loads, computes))), f"of {len(loads) - 1} layers"
    return [
        Figure(what="trace, loaded beside the compute of an earlier layer", value=count, unit=unit),
        Figure(what="trace, kernels of compute", value=compute),
        Figure(
            what="trace, first to last, of both sums",
            value=whole / (load + compute),
            unit="x",
            target="< 1",
        ),
    ]


def draw(path: Path, loads: Sequence[Kernel], computes: Sequence[Kernel]) -> None:
    from tests.benchmarks.plots import timeline

    lanes = {"load": loads, "compute": computes}
    bars = {
        name: [(each.layer, each.start, each.end) for each in lane] for name, lane in lanes.items()
    }
    timeline(path, "Layers loaded from the host, and computed", bars)
