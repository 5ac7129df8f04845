"""Several GPUs over NCCL: tensor parallel under CUDA graphs, prefill and decode on a GPU each or of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rollout import Engine, SamplingParams
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.split import CONFIG, MODEL, TOKEN, Split, run_placed

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
PROMPTS = random_prompts((90, 1, 17, 60))


def alone(path: Path) -> Any:
    engine = Engine.from_pretrained(path, device="cuda:0", **CONFIG)
    return [request[0].token_ids for request in engine.generate(PROMPTS, GREEDY)]


def share(rank: int, path: str) -> Any:
    engine = Engine.from_pretrained(
        path, device=f"cuda:{rank}", tensor_parallel_size=2, group=dist.group.WORLD, **CONFIG
    )
    answers = engine.generate(PROMPTS, GREEDY)
    assert engine.graphs is not None
    return [request[0] for request in answers], engine.graphs.replays


def test_tensor_parallel_under_cuda_graphs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", **MODEL)
    first, second = results(start_ranks(share, 2, tmp_path / "store", str(tmp_path), backend="nccl"))
    assert [each.token_ids for each in first[0]] == alone(tmp_path)
    assert first == second and first[1] > 0


@pytest.mark.parametrize(
    ("prefill", "gpus", "mapped"),
    [
        (1, [0, 1], True),
        (1, [0, 1], False),
        (2, [0, 1, 0], True),
        (1, [0, 0, 1], True),
        pytest.param(4, [0, 1, 2, 3, 0, 1], True, marks=pytest.mark.gpus(4)),
    ],
    ids=["1to1", "1to1-nccl", "2to1", "1to2", "4to2"],
)
def test_prefill_and_decode_of_any_sizes(tmp_path: Path, prefill: int, gpus: list[int], mapped: bool) -> None:
    """Where there are more processes than GPUs, a prefill and a decode rank share one; ranks of an engine never do."""
    save_tiny(tmp_path, "qwen3", **MODEL)
    decode = len(gpus) - prefill
    split = Split(path=str(tmp_path), prefill=prefill, decode=decode, mapped=mapped, calls=[(PROMPTS, GREEDY)])
    args = split, str(tmp_path), [f"cuda:{gpu}" for gpu in gpus], "nccl"
    group = "gloo" if mapped else "nccl"  # by which what is not mapped is sent
    seen = results(start_ranks(run_placed, len(gpus), tmp_path / "store", *args, backend=group))
    expected = alone(tmp_path)
    for each in seen[prefill:]:
        assert each["error"] is None and each["reason"] is None
        (answers,) = each["answers"]
        assert [request[0].token_ids for request in answers] == expected
        assert (each["split"].arrived, each["split"].recomputed) == (len(PROMPTS), 0)
        assert each["outstanding"] == 0
    ranges, pairs = 3 + 1 + 1 + 2, max(prefill, decode)
    assert sum(each["requests"] for each in seen[:prefill]) == ranges * pairs
    assert sum(each["bytes"] for each in seen[:prefill]) == sum(map(len, PROMPTS)) * TOKEN
