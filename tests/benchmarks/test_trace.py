"""Layers of kernels, and what ran at the same time, from traces made up here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.kvcache import trace
from tests.benchmarks.kvcache.trace import Kernel

LAYERS = 3


def event(name: str, start: float, duration: float, stream: int) -> dict[str, Any]:
    """Times in microseconds."""
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def step(first_compute: float) -> list[dict[str, Any]]:
    """Loads of 1 ms each from 0 on; a norm, and for each layer attention and MLP with a norm behind each, 0.8 ms."""
    events = [event("copy_rows_kernel", 1000 * layer, 1000, 20) for layer in range(LAYERS)]
    events += [event("embed", 0, 5, 7), event("_rms_norm", 10, 5, 7), event("other", 20, 5000, 9)]
    for layer in range(LAYERS):
        start = first_compute + 1000 * layer
        names = {"gemm": 300, "_rms_norm": 100, "silu": 300}
        for name, duration in [*names.items(), ("_rms_norm", 100)]:
            events.append(event(name, start, duration, 7))
            start += duration
    return [*events, event("head", first_compute + 1000 * LAYERS, 50, 7), {"ph": "M", "name": "process_name"}]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events[::-1]}))
    return path


def test_kernels_have_their_layers(tmp_path: Path) -> None:
    loads, computes = trace.read(write(tmp_path / "trace.json", step(1000)), LAYERS)
    assert loads == [Kernel(layer=i, start=i, end=i + 1) for i in range(LAYERS)]
    assert [each.layer for each in computes] == [0] * 4 + [1] * 4 + [2] * 4
    assert (computes[0].start, computes[0].end, computes[-1].end) == pytest.approx((1.0, 1.3, 3.8))


@pytest.mark.parametrize(
    ("first_compute", "expected"),
    [
        (1000, [set(), {0}, {1}]),  # right behind each load
        (2000, [set(), set(), {0}]),  # the host was late
        (3000, [set(), set(), set()]),  # nothing at the same time
    ],
)
def test_what_was_computed_while_a_layer_was_loaded(
    tmp_path: Path, first_compute: float, expected: list[set[int]]
) -> None:
    assert trace.beside(*trace.read(write(tmp_path / "trace.json", step(first_compute)), LAYERS)) == expected


def test_compute_of_the_same_or_a_later_layer_does_not_count() -> None:
    load, compute = Kernel(layer=1, start=0, end=2), [Kernel(layer=i, start=1, end=2) for i in (1, 2)]
    assert trace.beside([load], compute) == [set()]


def test_figures_of_a_trace(tmp_path: Path) -> None:
    found = trace.figures(*trace.read(write(tmp_path / "trace.json", step(1000)), LAYERS))
    assert [each.value for each in found] == pytest.approx([2, 2, 3.0, 2.4, 3.8, 3.8 / 5.4])
    assert found[0].unit == "of 2 layers"


def test_another_trace_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [each for each in step(1000) if each["name"] != "copy_rows_kernel"])
    with pytest.raises(
        ValueError, match=r"0 kernels copy_rows_kernel and 7 _rms_norm.*there are \['_rms_norm', 'embed'"
    ):
        trace.read(path, LAYERS)


def test_a_large_trace_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "trace.json", step(1000))
    content = path.read_bytes()
    trace.shrink(path)
    assert path.read_bytes() == content
    monkeypatch.setattr(trace, "LARGEST", 100)
    trace.shrink(path)
    assert not path.exists() and gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == content


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    trace.draw(tmp_path / "lanes.png", *trace.read(write(tmp_path / "trace.json", step(1000)), LAYERS))
    assert (tmp_path / "lanes.png").stat().st_size > 1000
