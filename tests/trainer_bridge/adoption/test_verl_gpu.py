"""verl's own GRPO on GPUs, with a real vLLM and with the native engine.

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


VLLM = pytest.param("memsaver", marks=needs(NEEDED_BY_VLLM))
NATIVE = pytest.param("memsaver-engine", marks=needs(NEEDED))


@pytest.mark.parametrize("side", [VLLM, NATIVE])
def test_grpo_of_verl_syncs_in_place(side: str, tmp_path: Path) -> None:
    check_syncs(side, tmp_path, gpus=1, ranks=1)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("side", [VLLM, NATIVE])
@pytest.mark.parametrize("ranks", [1, 2], ids=["replicas", "shared"])
def test_two_ranks_of_verl_sync_in_place(side: str, ranks: int, tmp_path: Path) -> None:
    check_syncs(side, tmp_path, gpus=2, ranks=ranks)


def check_syncs(side: str, out: Path, gpus: int, ranks: int) -> None:
    """Run two steps with engines of `ranks` GPUs, and check each sync of the first rank."""
    words = ["benchmarks.bench_verl", "--steps", "2", "--cases", side, "--out", str(out)]
    words += ["--gpus", str(gpus), "--tensor-parallel", str(ranks)]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    path = out / f"{side}.log"
    log = path.read_text() if path.exists() else ""
    assert done.returncode == 0, done.stderr[-2000:] + log[-4000:]
    rows = [json.loads(row) for row in (out / f"{side}.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and len({row["nbytes"] for row in rows}) == 1
    assert rows[1]["rise"] < rows[1]["nbytes"] / 20
    assert sum(rows[-1]["stages"].values()) == pytest.approx(rows[-1]["seconds"] * 1e3)
