"""Every benchmark at tiny sizes, once: each case runs through its own checks, and its figures come
out.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_sync, common, gate

# Of each script: arguments; names in what it saves.
SCRIPTS: dict[str, tuple[list[str], set[str]]] = {
    "bench_memory": (
        [],
        {"memsaver, kept", "driver's floor, clean", "memsaver, 60 GiB handed over"},
    ),
    "bench_backup": ([], {"pinned copy", "marked clean", "swap 16 GiB"}),
    "bench_sync": (
        ["--shape", "qwen3-30b-a3b", "--cases", "one", "two"],
        {"floors", "memsaver", "offloaded", "IPC buckets", *bench_sync.TWO},
    ),
    "bench_generate": ([], {"ms", "mismatch"}),
    "bench_switch": ([], {"everything stays", "everything is offloaded"}),
    "bench_vllm": ([], set()),
}
COUNTING = {"bench_memory", "bench_backup", "bench_sync"}  # bytes of the whole device
ON_GPU = {"bench_sync": {"IPC buckets"}}
MARKS = {name: [pytest.mark.alone] for name in COUNTING}
for _long in ("bench_sync", "bench_switch"):  # what they run has tests of its own
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
    importlib.import_module(f"benchmarks.{script}").main(
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


def test_gate_names_ratios_that_are_slower_beyond_their_noise() -> None:
    stored = {name: {"ratio": 2.0, "noise": 0.1} for name in ("faster", "noisy", "slower")}
    found = {"faster": 1.0, "noisy": 2.19, "slower": 2.21, "absent": None, "new": 5.0}
    rows, slower = gate.judge(found, stored)
    assert slower == ["slower"]
    assert [row[-1] for row in rows] == ["ok", "ok", "SLOWER", "not measured", "nothing stored"]


def test_gate_reads_its_ratios_from_what_the_scripts_save(tmp_path: Path, device: str) -> None:
    """Of the quick scripts, at tiny sizes; accepted, the same results pass, halved they are red."""
    stored, quick = tmp_path / "gate.json", ["bench_memory", "bench_backup", "bench_generate"]
    words = ["--tiny", "--stored", str(stored), "--cases", *quick]
    gate.main([*words, "--accept"])
    accepted = json.loads(stored.read_text())
    assert accepted.keys() == {each.name for each in gate.RATIOS if each.script in quick}
    stored.write_text(json.dumps({name: {"ratio": 1e-9, "noise": 0.0} for name in accepted}))
    with pytest.raises(SystemExit, match="slower than accepted, beyond noise: "):
        gate.main(words)


def test_gate_takes_the_figure_of_that_name_and_no_other() -> None:
    [paused] = [each for each in gate.RATIOS if each.name.startswith("8 GiB paused")]
    cases = {
        "host, extents kept": {"first pause": 9.0, "pause": 3.0},
        "pinned copy": {"pause": 2.0},
    }
    results = {
        name: [{"what": what, "value": value, "unit": "ms"} for what, value in figures.items()]
        for name, figures in cases.items()
    }
    assert paused.read(results) == 1.5 and paused.read({}) is None


def test_every_accepted_ratio_is_one_that_the_gate_measures() -> None:
    stored = json.loads(gate.STORED.read_text())
    assert stored.keys() <= {each.name for each in gate.RATIOS}
    assert {each.script for each in gate.RATIOS} == gate.ARGUMENTS.keys()
