"""`make bench-kvcache` at tiny sizes: every case runs through its own checks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.ops.host_copy import copy_rows
from kvcache.tiers import host
from tests.benchmarks import bench_kvcache
from tests.benchmarks.kvcache.base import Figure, Scale, make_scale


@pytest.mark.parametrize("case", bench_kvcache.CASES)
def test_a_case_passes_its_own_checks(case: str, device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not interpreted here: the kernels run on the GPU")
    figures = bench_kvcache.CASES[case](make_scale(device, tiny=True))
    assert figures and all(figure.value == figure.value for figure in figures)


def test_the_script_prints_a_table_and_saves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_kvcache.main(["--tiny", "--cases", "decode bookkeeping", "--out", str(tmp_path)])
    assert "| decode bookkeeping, CPU | extend |" in capsys.readouterr().out
    saved = json.loads((tmp_path / "bench_kvcache.json").read_text())
    assert saved["decode bookkeeping, CPU"][0]["what"] == "extend"


def test_gpu_cases_are_skipped_without_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kvcache.measure(["write", "resize"], tiny=False) == {}
    assert capsys.readouterr().out == "write: skipped, it needs a GPU\nresize: skipped, it needs a GPU\n"


def test_a_case_that_fails_costs_no_other_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scale: Scale) -> list[Figure]:
        raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(bench_kvcache.CASES, "radix", fail)
    with pytest.raises(SystemExit, match="failed, see above: radix, CPU"):
        bench_kvcache.main(["--tiny", "--cases", "radix", "disk tier", "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "bench_kvcache.json").read_text())
    assert saved["radix, CPU"] == [] and len(saved["disk tier, CPU"]) == 2


def test_shares_of_copies_are_drawn(tmp_path: Path) -> None:
    figures = [Figure(what=unit, value=90.0, unit=unit) for unit in (*bench_kvcache.DRAWN, "us")]
    bench_kvcache.draw(tmp_path / "none.png", {"case": figures[2:]})
    assert not list(tmp_path.iterdir())
    bench_kvcache.draw(tmp_path / "some.png", {"case": figures})
    assert [each.name for each in tmp_path.iterdir()] == ["some.png"]


def test_the_overlap_case_notices_rows_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "copy_rows", lambda *args: None)
    with pytest.raises(AssertionError, match="other tokens than without tiers"):
        bench_kvcache.CASES["load overlap"](make_scale("cpu", tiny=True))


@pytest.mark.parametrize("lost", ["back up", "load"])
def test_the_host_tier_case_notices_rows_that_did_not_come(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*args: Any) -> None:
        if args[4] != (lost == "back up"):
            copy_rows(*args)

    monkeypatch.setattr(host, "copy_rows", copy)
    with pytest.raises(AssertionError):
        bench_kvcache.CASES["host tier"](make_scale("cpu", tiny=True))
