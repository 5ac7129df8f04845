"""Several GPUs over NCCL: tensor parallelism under CUDA graphs, and prefill/decode splits."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memsaver.memory import empty_torch_cache
from rollout import Engine, SamplingParams
from rollout.running.graphs import ladder
from tests.helpers.memory import Scribbler, counted, process_bytes
from tests.helpers.models import DEEPSEEK_MOE, MLA, save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.split import CONFIG, MODEL, TOKEN, Split, run_placed

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
PROMPTS = random_prompts((90, 1, 17, 60))


# Experts are divided by expert and by inner channels, also with odd sizes, numbers of experts that
# two ranks do not divide, and latent rows.
MIXTURES: list[tuple[str, dict[str, Any], int]] = [
    ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 23}, 2),
    ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 8}, 1),
    ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, 2),
    ("deepseek_v3", MLA, 1),
    ("deepseek_v3", {**MLA, **DEEPSEEK_MOE}, 2),
]


def alone(path: Path) -> Any:
    engine = Engine.from_pretrained(path, device="cuda:0", **CONFIG)
    return [request[0].token_ids for request in engine.generate(PROMPTS, GREEDY)]


def share(rank: int, path: str, experts: int = 1) -> Any:
    sizes = {"tensor_parallel_size": 2, "expert_parallel": experts}
    engine = Engine.from_pretrained(
        path, device=f"cuda:{rank}", group=dist.group.WORLD, **sizes, **CONFIG
    )
    answers = engine.generate(PROMPTS, GREEDY)
    assert engine.graphs is not None
    return [request[0] for request in answers], engine.graphs.replays


def test_tensor_parallel_graphs_answer_like_one_gpu(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", **MODEL)
    first, second = results(
        start_ranks(share, 2, tmp_path / "store", str(tmp_path), backend="nccl")
    )
    assert [answer.token_ids for answer in first[0]] == alone(tmp_path)
    assert first == second and first[1] > 0


@pytest.mark.parametrize(("kind", "overrides", "experts"), MIXTURES)
def test_tensor_parallel_graphs_of_mixtures_and_latent_attention_answer_like_one_gpu(
    tmp_path: Path, kind: str, overrides: dict[str, Any], experts: int
) -> None:
    save_tiny(tmp_path, kind, **overrides)
    ranks = start_ranks(share, 2, tmp_path / "store", str(tmp_path), experts, backend="nccl")
    first, second = results(ranks)
    assert [answer.token_ids for answer in first[0]] == alone(tmp_path)
    assert first == second and first[1] > 0


VOCABULARIES = (151_936, 128_256, 49_152)  # Qwen3, Llama 3, SmolLM2
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def sleep_and_wake(rank: int, paths: list[str]) -> list[dict[str, Any]]:
    """Return answers before and after sleeps and of a fresh engine, for every vocabulary.

    Answers cover the sizes of the ladder. While the engine sleeps, another process fills the freed
    memory with 0xFF.
    """
    multiprocessing.current_process().daemon = False  # daemons may not start processes
    scribbler = Scribbler(f"cuda:{rank}")
    try:
        return [_through_sleeps(rank, path, scribbler) for path in paths]
    finally:
        scribbler.close()


def _through_sleeps(rank: int, path: str, scribbler: Scribbler) -> dict[str, Any]:
    def make() -> Engine:
        settings = {
            "kv_tokens": 16_384,
            "max_running": 512,
            "prefix_cache": False,
            "dtype": torch.bfloat16,
        }
        group = dist.group.WORLD
        return Engine.from_pretrained(
            path, device=f"cuda:{rank}", tensor_parallel_size=2, group=group, **settings
        )

    def answers(engine: Engine) -> list[list[int]]:
        sizes = [size for size in ladder(512) if size <= 16 or size in (64, 160, 512)]
        return [
            answer[0].token_ids
            for size in sizes
            for answer in engine.generate(prompts[:size], SHORT)
        ]

    def device_bytes() -> int:
        dist.barrier()  # torch allocates a separate segment for it
        empty_torch_cache(torch.device("cuda", rank))  # as a sleep does, with cuBLAS's workspaces
        return process_bytes(f"cuda:{rank}")

    prompts = random_prompts([7] * 512)
    engine = make()
    before, freed = answers(engine), []
    for level in (1, 2, 1):
        held, used = engine.report().committed_bytes, device_bytes()
        engine.sleep(level)
        freed.append(used - device_bytes() - held)
        scribbler.fill(held)
        dist.barrier()
        engine.wake_up()
        if level == 2:
            engine.load(path)
        again = answers(engine)
        if again != before:
            break
    assert engine.graphs is not None and engine.graphs.replays > 0
    del engine
    gc.collect()
    return {"before": before, "after": again, "freed": freed, "fresh": answers(make())}


@pytest.mark.alone
def test_tensor_parallel_graphs_answer_the_same_after_sleeps_at_real_vocabularies(
    tmp_path: Path,
) -> None:
    """Check that buffers that NCCL registers for captured collectives do not lie on tags.

    The tags have different pages after a sleep.
    """
    paths = [str(tmp_path / str(size)) for size in VOCABULARIES]
    for path, size in zip(paths, VOCABULARIES, strict=True):
        model = {"vocab_size": size, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        save_tiny(Path(path), "qwen3", **model, num_hidden_layers=2)
    ranks = results(
        start_ranks(sleep_and_wake, 2, tmp_path / "store", paths, backend="nccl", seconds=120), 300
    )
    for vocabulary in zip(*ranks, strict=True):
        for result in vocabulary:
            assert result["after"] == result["before"] == result["fresh"]
            assert result["before"] == vocabulary[0]["before"]
            assert result["freed"] == [counted(0, "cuda")] * 3


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
def test_prefill_and_decode_engines_of_any_sizes_answer_like_one_gpu(
    tmp_path: Path, prefill: int, gpus: list[int], mapped: bool
) -> None:
    """Place a prefill and a decode rank on one GPU if there are more processes than GPUs."""
    save_tiny(tmp_path, "qwen3", **MODEL)
    decode = len(gpus) - prefill
    split = Split(
        path=str(tmp_path), prefill=prefill, decode=decode, mapped=mapped, calls=[(PROMPTS, GREEDY)]
    )
    args = split, str(tmp_path), [f"cuda:{gpu}" for gpu in gpus], "nccl"
    group = "gloo" if mapped else "nccl"  # sends the data that is not written to mapped memory
    ranks = results(start_ranks(run_placed, len(gpus), tmp_path / "store", *args, backend=group))
    expected = alone(tmp_path)
    for result in ranks[prefill:]:
        assert result["error"] is None and result["reason"] is None
        (answers,) = result["answers"]
        assert [request[0].token_ids for request in answers] == expected
        assert (result["split"].arrived, result["split"].recomputed) == (len(PROMPTS), 0)
        assert result["outstanding"] == 0
    ranges, pairs = 3 + 1 + 1 + 2, max(prefill, decode)
    assert sum(result["requests"] for result in ranks[:prefill]) == ranges * pairs
    assert sum(result["bytes"] for result in ranks[:prefill]) == sum(map(len, PROMPTS)) * TOKEN
