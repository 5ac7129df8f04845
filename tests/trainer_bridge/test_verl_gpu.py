"""verl's own GRPO with a real vLLM on a GPU: every sync is verified and takes no memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.docs.pages import ROOT

NEEDED = ("vllm", "verl", "transfer_queue", "tensordict", "uvicorn")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)),
        reason=f"one of {', '.join(NEEDED)} is not installed",
    ),
]


def test_grpo_of_verl_syncs_in_place(tmp_path: Path) -> None:
    words = ["benchmarks.bench_verl", "--steps", "2", "--cases", "memsaver", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    log = (tmp_path / "memsaver.log").read_text() if (tmp_path / "memsaver.log").exists() else ""
    assert done.returncode == 0, done.stderr[-2000:] + log[-4000:]
    rows = [json.loads(row) for row in (tmp_path / "memsaver.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and len({row["nbytes"] for row in rows}) == 1
    assert rows[-1]["rise"] < rows[-1]["nbytes"] / 20
