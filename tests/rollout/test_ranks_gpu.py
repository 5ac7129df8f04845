"""Several GPUs over NCCL: tensor parallel under CUDA graphs, prefill and decode on a GPU each or of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rollout import Engine, SamplingParams
from rollout.split import (
    DecodeEngine,
    GroupReader,
    GroupWriter,
    MappedReader,
    MappedWriter,
    PrefillEngine,
    accept,
    dial,
)
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.split import CONFIG, KEY, MODEL, TOKEN, Split, run_placed

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


def split(rank: int, path: str, mapped: bool) -> Any:
    device, address = f"cuda:{rank}", f"{path}/socket"
    if rank == 0:
        prefill = PrefillEngine.from_pretrained(path, device=device, **CONFIG)
        writer = MappedWriter() if mapped else GroupWriter([1])
        prefill.connect(dial([address], KEY), writer)
        prefill.serve()
        return writer.requests, writer.nbytes
    decode = DecodeEngine.from_pretrained(path, device=device, **CONFIG)
    reader = MappedReader() if mapped else GroupReader([0])
    decode.connect(accept(address, 1, KEY), reader, ring_bytes=40 * TOKEN)
    answers = decode.generate(PROMPTS, GREEDY)
    decode.close()
    return [request[0].token_ids for request in answers], decode.split.arrived


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "nccl"])
def test_prefill_and_decode_on_a_gpu_each(tmp_path: Path, mapped: bool) -> None:
    save_tiny(tmp_path, "qwen3", **MODEL)
    sent, found = results(start_ranks(split, 2, tmp_path / "store", str(tmp_path), mapped, backend="nccl"))
    assert found == (alone(tmp_path), len(PROMPTS))
    assert sent == (3 + 1 + 1 + 2, sum(map(len, PROMPTS)) * TOKEN)


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus"),
    [
        (2, 1, 2),
        (1, 2, 2),
        pytest.param(4, 2, 4, marks=pytest.mark.gpus(4)),
    ],
    ids=["2to1", "1to2", "4to2"],
)
def test_prefill_and_decode_of_different_sizes(tmp_path: Path, prefill: int, decode: int, gpus: int) -> None:
    """More processes than GPUs: a prefill and a decode rank share one, the ranks of an engine never do."""
    save_tiny(tmp_path, "qwen3", **MODEL)
    split = Split(
        path=str(tmp_path), prefill=prefill, decode=decode, mapped=True, ring_bytes=40 * TOKEN // decode,
        calls=[(PROMPTS, GREEDY)], prefill_config=CONFIG, decode_config=CONFIG,
    )  # fmt: skip
    devices = [f"cuda:{i}" for i in range(gpus)]
    ranks = start_ranks(run_placed, prefill + decode, tmp_path / "store", split, str(tmp_path), devices, "nccl")
    seen = results(ranks)
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
