"""`make bench-kvcache` at tiny sizes: every case runs through its own checks."""

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks import bench_kvcache
from tests.benchmarks.kvcache.base import make_scale


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
