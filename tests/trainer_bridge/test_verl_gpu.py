"""verl's own GRPO on a GPU, with a real vLLM and with the native engine.

Every sync is verified and takes no memory.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.docs.pages import ROOT

NEEDED = ("verl", "transfer_queue", "tensordict")
NEEDED_BY_VLLM = (*NEEDED, "vllm", "uvicorn")
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(900)]


def needs(names: tuple[str, ...]) -> pytest.MarkDecorator:
    missing = not all(map(importlib.util.find_spec, names))
    return pytest.mark.skipif(missing, reason=f"one of {', '.join(names)} is not installed")


@pytest.mark.parametrize(
    "side",
    [
        pytest.param("memsaver", marks=needs(NEEDED_BY_VLLM)),
        pytest.param("memsaver-engine", marks=needs(NEEDED)),
    ],
)
def test_grpo_of_verl_syncs_in_place(side: str, tmp_path: Path) -> None:
    words = ["benchmarks.bench_verl", "--steps", "2", "--cases", side, "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    path = tmp_path / f"{side}.log"
    log = path.read_text() if path.exists() else ""
    assert done.returncode == 0, done.stderr[-2000:] + log[-4000:]
    rows = [json.loads(row) for row in (tmp_path / f"{side}.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and len({row["nbytes"] for row in rows}) == 1
    assert rows[1]["rise"] < rows[1]["nbytes"] / 20
    assert sum(rows[-1]["stages"].values()) == pytest.approx(rows[-1]["seconds"] * 1e3)
