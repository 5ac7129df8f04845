"""Every benchmark at tiny sizes, once: each case runs through its own checks, and its figures come
out.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import bench_kvcache, bench_sync, common
from tests.benchmarks.kvcache import trace

# Of each script: arguments; names in what it saves.
SCRIPTS: dict[str, tuple[list[str], set[str]]] = {
    "bench_memory": (
        [],
        {"memsaver, kept", "driver's floor, clean", "memsaver, 60 GiB handed over"},
    ),
    "bench_backup": ([], {"pinned copy", "marked clean", "swap 16 GiB", "disk"}),
    "bench_memory_host": ([], {"kernel's own", "memsaver, driver", "memsaver, keep"}),
    "bench_kvcache": ([], {f"{name}, CPU" for name in bench_kvcache.CASES}),
    "bench_sync": (
        ["--shape", "qwen3-30b-a3b", "--cases", "one", "two"],
        {"floors", "memsaver", "offloaded", "copies", "IPC buckets", *bench_sync.TWO},
    ),
    "bench_generate": ([], {"ms", "mismatch"}),
    "bench_switch": ([], {"everything stays", "everything is offloaded"}),
    "bench_hand_over": (["--steps", "3"], {"tiny"}),
    "bench_mismatch": ([], {"rows"}),
    "bench_score": ([], {"passes", "apart"}),
    "bench_optimizer": ([], {"update"}),
    "bench_vllm": ([], set()),
    "bench_moe": ([], {"tokens"}),
    "bench_moe_train": ([], {"ms", "experts"}),
    "bench_replay": ([], {"ms", "mismatches"}),
}
COUNTING = {"bench_memory", "bench_backup", "bench_sync"}  # bytes of the whole device
ON_GPU = {
    "bench_kvcache": {*bench_kvcache.HOST_CASES, *bench_kvcache.GPU_CASES},
    "bench_sync": {"copies", "IPC buckets"},
}


MARKS = {name: [pytest.mark.alone] for name in COUNTING}
LONG = ("kvcache", "sync", "switch", "hand_over", "replay", "score", "moe", "moe_train")
for _long in map("bench_{}".format, LONG):  # what they run has tests of its own
    MARKS[_long] = [*MARKS.get(_long, []), pytest.mark.extended]


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=MARKS.get(each, [])) for each in SCRIPTS]
)
def test_a_script_runs_prints_its_table_and_saves_it(
    script: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not interpreted here: the scripts run on the GPU")
    arguments, names = SCRIPTS[script]
    if device != "cpu":
        names = ON_GPU.get(script, names)
        arguments = [each for each in arguments if each != "two"]
    importlib.import_module(f"tests.benchmarks.{script}").main(
        ["--tiny", "--out", str(tmp_path), *arguments]
    )
    assert "| --- | --- |" in capsys.readouterr().out
    saved = json.loads((tmp_path / f"{script}.json").read_text())
    assert names | {"conditions"} <= saved.keys()
    assert all(saved[name] for name in names)


def test_a_case_that_fails_or_is_skipped_costs_no_other_its_figures(tmp_path: Path) -> None:
    def fail() -> common.Figures:
        raise ZeroDivisionError

    def skip() -> common.Figures:
        raise common.Skipped("no reason")

    cases = {"bad": fail, "absent": skip, "good": lambda: common.figures({"it": 1.0})}
    with pytest.raises(SystemExit, match="failed, see above: bad$"):
        common.run_cases("some", cases, tmp_path, bar=lambda name, figure: (name, figure.what))
    saved = json.loads((tmp_path / "some.json").read_text())
    assert saved.keys() == {"conditions", "good"} and (tmp_path / "some.png").exists()


def test_layers_are_told_from_a_trace(tmp_path: Path) -> None:
    """3 loads of 1 ms each from 0 on; a norm, and from 1 ms on for each layer two kernels with a
    norm behind each.
    """

    def kernel(name: str, start: float, duration: float, stream: int) -> dict[str, Any]:
        return {
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": duration,
            "args": {"stream": stream},
        }

    loads = [kernel("copy_rows_kernel", 1000 * layer, 1000, 20) for layer in range(3)]
    computes = [kernel("_rms_norm", 10, 5, 7), kernel("other", 20, 5000, 9)]
    for layer in range(3):
        for nth, name in enumerate(("gemm", "_rms_norm", "silu", "_rms_norm")):
            computes.append(kernel(name, 1000 + 1000 * layer + 200 * nth, 200, 7))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*computes, {"name": "process_name"}, *loads]}))
    found = trace.read(path, 3)
    assert [each.layer for each in found[1]] == [0] * 4 + [1] * 4 + [2] * 4
    assert trace.beside(*found) == [set(), {0}, {1}]
    assert [each.value for each in trace.figures(*found)] == pytest.approx([2, 2.4, 3.8 / 5.4])
    trace.draw(tmp_path / "lanes.png", *found)
    path.write_text(json.dumps({"traceEvents": computes}))
    with pytest.raises(ValueError, match="0 kernels copy_rows_kernel and 7 _rms_norm"):
        trace.read(path, 3)
