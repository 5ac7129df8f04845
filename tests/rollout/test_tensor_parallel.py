"""Engines of two and four ranks give one rank's answers: greedy and sampled tokens equal,
log-probabilities in fp32.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollout import Completion, Engine, EngineConfig, KVTiers, SamplingParams
from rollout.model import load_model_config
from rollout.parallel import TensorParallel
from tests.helpers.models import MLA
from tests.helpers.peers import Failed, Peer
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import MEAN_GAP, assert_same, random_prompts
from tests.helpers.rollout.saved import Saved

# Two KV heads (copied where there are four ranks), 199 tokens of vocabulary (padded), biases, tied
# and sliding.
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("qwen2", {"head_dim": 12}),
    ("qwen3", {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}),
    ("qwen3_moe", {"moe_intermediate_size": 12}),
    (
        "ministral",
        {
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
            "head_dim": 12,
        },
    ),
]
SIZES = (2, 4)
CONFIG: dict[str, Any] = {"kv_tokens": 384, "max_prefill_tokens": 48, "max_running": 8}
GREEDY = SamplingParams(max_tokens=10, temperature=0)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.3, top_p=0.95, n=2, seed=5)


def config(path: str) -> dict[str, Any]:
    return CONFIG | {"return_routed_experts": load_model_config(path).has_experts}


def answers(engine: Engine) -> list[Completion]:
    prompts = random_prompts((90, 1, 17, 60))  # the first step ends no prompt
    found = [engine.generate(prompts, params) for params in (GREEDY, SAMPLED)]
    engine.check_integrity()
    return [sample for out in found for request in out for sample in request]


def groups(rank: int) -> dict[int, dist.ProcessGroup]:
    """This rank's group of each size; made in one order on all ranks."""
    found: dict[int, dist.ProcessGroup] = {4: dist.group.WORLD}  # type: ignore[dict-item]
    for pair in ([0, 1], [2, 3]):
        made = dist.new_group(pair)
        if rank in pair:
            found[2] = made
    return found


def generate(rank: int, paths: list[str]) -> dict[int, Any]:
    """By size: the answers of every model."""
    found: dict[int, Any] = {}
    for size, group in groups(rank).items():
        engines = [
            Engine.from_pretrained(path, tensor_parallel_size=size, group=group, **config(path))
            for path in paths
        ]
        found[size] = [answers(engine) for engine in engines]
    return found


@pytest.fixture(scope="module")
def paths(saved: Saved) -> list[str]:
    return [str(saved(kind, **overrides)[0]) for kind, overrides in MODELS]


@pytest.fixture(scope="module")
def found(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    return results(start_ranks(generate, 4, tmp_path_factory.mktemp("meet") / "store", paths))


@pytest.mark.parametrize("model", range(len(MODELS)), ids=[kind for kind, _ in MODELS])
def test_answers_are_those_of_one_rank(
    paths: list[str], found: list[dict[int, Any]], model: int
) -> None:
    alone = answers(Engine.from_pretrained(paths[model], **config(paths[model])))
    for size in SIZES:
        for rank in range(4):
            mine = found[rank][size][model]
            assert_same(mine, alone)
            for one, other in zip(mine, alone, strict=True):
                assert np.array_equal(one.routed_experts, other.routed_experts)
            pairs = zip(mine, alone, strict=True)
            gap = torch.cat(
                [torch.tensor(a.logprobs) - torch.tensor(b.logprobs) for a, b in pairs]
            ).abs()
            assert gap.mean() <= MEAN_GAP
        assert found[0][size][model] == found[1][size][model], (
            "ranks differ in the bits of log-probabilities"
        )


def staged(rank: int) -> list[bool]:
    """Whether what captured collectives do through the staging memory is what the others do, bit
    for bit.
    """
    ranks = TensorParallel(2, dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    width = 151_936
    ranks.stage_captures(width, torch.bfloat16, torch.device("cpu"))
    hidden = torch.randn(3, 8192, 1024, generator=generator)  # 96 MiB, in three parts
    columns = torch.randn(130, width // 2, generator=generator).bfloat16()
    ids, rows = torch.randint(0, 14, (50,)), torch.randn(7, 33, generator=generator)

    def all_of_it() -> list[torch.Tensor]:
        return [ranks.sum(hidden.clone(), "x"), ranks.join(columns, width), ranks.embed(ids, rows)]

    plain = all_of_it()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = all_of_it()
    return [torch.equal(one, other) for one, other in zip(plain, captured, strict=True)]


def test_captured_collectives_work_on_memory_of_their_own(tmp_path: Path) -> None:
    assert results(start_ranks(staged, 2, tmp_path / "store")) == [[True] * 3] * 2


# ---------------------------------------------------------------- failures


def lose_one(rank: int, path: str, how: str) -> str:
    # for what both do at once; a busy machine starts them apart
    group = dist.new_group(timeout=timedelta(seconds=2))
    engine = Engine.from_pretrained(path, tensor_parallel_size=2, group=group, **CONFIG)
    dist.barrier()

    def on_progress(done: int, total: int, tokens: int) -> None:
        if rank == 1 and how == "raise":
            raise OSError("cosmic ray")
        if rank == 1 and how == "die":
            os._exit(1)

    try:
        engine.generate(random_prompts((5,)), GREEDY, on_progress=on_progress)
    except (RuntimeError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    with pytest.raises(RuntimeError, match="cannot generate: tensor-parallel rank"):
        engine.generate(random_prompts((5,)), GREEDY)
    return said


@pytest.mark.parametrize(
    ("how", "named"), [("raise", "rank 1 failed: OSError: cosmic ray"), ("die", "rank 1 is silent")]
)
def test_a_lost_rank_is_named_with_the_stage(
    paths: list[str], tmp_path: Path, how: str, named: str
) -> None:
    ranks: list[Peer] = start_ranks(lose_one, 2, tmp_path / "store", paths[0], how)
    said = results(ranks[:1])[0]
    assert said.startswith(
        "RankError: tensor-parallel rank 0 of 2 waited in stage 'embedding' in vain: "
    )
    assert named in said
    if how == "raise":
        assert results(ranks[1:]) == ["OSError: cosmic ray"]
    ranks[1].kill()


def unlike(rank: int, path: str) -> None:
    Engine.from_pretrained(
        path,
        tensor_parallel_size=2,
        group=dist.group.WORLD,
        **CONFIG | {"seed": rank},
        load_weights=False,
    )


def test_ranks_of_another_configuration_are_refused(paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        Failed,
        match="ValueError: the model or EngineConfig of tensor-parallel ranks \\[1\\] differs",
    ):
        results(start_ranks(unlike, 2, tmp_path / "store", paths[0]))


# ---------------------------------------------------------------- what is refused


class Alone(TensorParallel):
    """Rank 0 of so many, without the others: enough to be refused."""

    def __init__(self, size: int, group: Any) -> None:
        super().__init__(1, group)
        self.size = size

    def check_same(self, what: str, value: str) -> None:
        return


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("deepseek_v2", MLA, "needs plain attention in every layer"),
        ("qwen3_next", {}, "needs plain attention in every layer"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "k_proj.weight: .* shared in units of 8 by 2",
        ),
        (
            "llama",
            {"intermediate_size": 81},
            "gate_proj.weight: dimension 0 of .* cannot be shared by 2",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_at_load(
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    overrides: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("rollout.engine.TensorParallel", Alone)
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(saved(kind, **overrides)[0], tensor_parallel_size=2, **CONFIG)


def test_a_group_is_needed_and_swapping_tiers_are_taken(paths: list[str]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs Engine"):
        Engine.from_pretrained(paths[0], tensor_parallel_size=2)
    EngineConfig(tensor_parallel_size=2, tiers=KVTiers(host_ratio=1, preemption="swap"))
