"""Engines of two and four ranks give transformers' greedy answers and one rank's sampled ones,
log-probabilities in fp32; with experts divided by inner channels, by expert, and both.
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
from tests.helpers.models import DEEPSEEK_MOE, MLA
from tests.helpers.peers import Failed, Peer
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import (
    GAP,
    MEAN_GAP,
    STATES_GAP,
    assert_same,
    check,
    random_prompts,
)
from tests.helpers.rollout.saved import Saved

SIZES = (2, 4)
V2, V3, NEXT, MOE = "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_moe"
LATENT = {"num_key_value_heads": 8, "num_attention_heads": 8}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
Model = tuple[str, dict[str, Any], tuple[int, int]]
"""What a tiny model differs in, and `expert_parallel` on two ranks and on four."""


# Two KV heads (copied where there are four ranks), 199 tokens of vocabulary (padded), biases, tied
# and sliding; latent rows; linear layers; experts that the ranks do not divide evenly, or not at
# all (the last of four ranks has none of five).
LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 12}
EIGHT = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
INNER = {"moe_intermediate_size": 13, "shared_expert_intermediate_size": 12}
NARROW = {"head_dim": 12, "hidden_size": 40, "intermediate_size": 10}
FIVE = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
MODELS: list[Model] = [
    ("llama", {"attention_bias": True}, (1, 1)),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, (1, 1)),
    ("qwen2", {"head_dim": 12}, (1, 1)),
    ("qwen3", EIGHT, (1, 1)),
    (MOE, {"moe_intermediate_size": 12}, (1, 1)),
    (MOE, {"moe_intermediate_size": 14}, (1, 2)),
    (MOE, {"moe_intermediate_size": 11, "num_experts": 5, "mlp_only_layers": [0]}, (2, 4)),
    ("ministral", {"sliding_window": 24, **LAYERS}, (1, 1)),
    (V2, MLA, (1, 1)),
    (V3, {**MLA, "attention_bias": True}, (1, 1)),
    (V3, {**MLA, **DEEPSEEK_MOE}, (2, 4)),
    (NEXT, {**LINEAR, "attention_bias": True}, (1, 1)),
    (NEXT, {**LINEAR, **INNER, "num_experts": 6, "num_experts_per_tok": 3}, (2, 4)),
    ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, **NARROW}, (1, 4)),
    (V2, {**MLA, **LATENT, **DEEPSEEK_MOE, **FIVE}, (1, 4)),
]
CONFIG: dict[str, Any] = {"kv_tokens": 384, "max_prefill_tokens": 48, "max_running": 8}
GREEDY = SamplingParams(max_tokens=10, temperature=0)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.3, top_p=0.95, n=2, seed=5)


PROMPTS = random_prompts((90, 1, 17, 60))  # the first step ends no prompt


def config(path: str) -> dict[str, Any]:
    return CONFIG | {"return_routed_experts": load_model_config(path).has_experts}


def answers(engine: Engine) -> list[Completion]:
    """Asleep once amid the greedy ones, which are preempted and begin again."""

    def nap(done: int, total: int, tokens: int) -> None:
        if tokens >= 9 and not engine.scheduler.preemptions:
            engine.sleep(unfinished="preempt", tags=["kv_cache"])
            engine.wake_up()

    found = [engine.generate(PROMPTS, GREEDY, on_progress=nap), engine.generate(PROMPTS, SAMPLED)]
    assert engine.scheduler.preemptions
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


def generate(rank: int, paths: list[str], divided: list[tuple[int, int]]) -> dict[int, Any]:
    """By size: the answers of every model. divided: `expert_parallel` of each."""
    found: dict[int, Any] = {}
    for size, group in groups(rank).items():
        found[size] = []
        for path, parts in zip(paths, divided, strict=True):
            sizes = {"tensor_parallel_size": size, "expert_parallel": parts[SIZES.index(size)]}
            engine = Engine.from_pretrained(path, group=group, **sizes, **config(path))
            found[size].append(answers(engine))
    return found


@pytest.fixture(scope="module")
def paths(saved: Saved) -> list[str]:
    return [str(saved(kind, **overrides)[0]) for kind, overrides, _ in MODELS]


@pytest.fixture(scope="module")
def found(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    store, divided = tmp_path_factory.mktemp("meet") / "store", [parts for _, _, parts in MODELS]
    return results(start_ranks(generate, 4, store, paths, divided), 400)


@pytest.mark.parametrize("model", range(len(MODELS)), ids=[kind for kind, _, _ in MODELS])
def test_answers_are_those_of_one_rank(
    paths: list[str], found: list[dict[int, Any]], model: int, saved: Saved
) -> None:
    kind, overrides, _ = MODELS[model]
    alone = answers(Engine.from_pretrained(paths[model], **config(paths[model])))
    check(saved(kind, **overrides)[1], PROMPTS, [[each] for each in alone[: len(PROMPTS)]])
    for size in SIZES:
        for rank in range(4):
            mine = found[rank][size][model]
            assert_same(mine, alone, STATES_GAP if kind == NEXT else GAP)
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
    sizes = CONFIG | {"seed": rank, "tensor_parallel_size": 2}
    Engine.from_pretrained(path, group=dist.group.WORLD, load_weights=False, **sizes)


def test_ranks_of_another_configuration_are_refused(paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"the model or EngineConfig of .* ranks \[1\] differs"):
        results(start_ranks(unlike, 2, tmp_path / "store", paths[0]))


# ---------------------------------------------------------------- what is refused


def test_what_ranks_cannot_do_is_refused(paths: list[str]) -> None:
    sizes = {"tensor_parallel_size": 2, "expert_parallel": 2}
    with pytest.raises(ValueError, match="expert_parallel=2 is for mixtures of experts"):
        Engine.from_pretrained(paths[0], **sizes, **CONFIG)
    with pytest.raises(ValueError, match="expert_parallel=3 must divide tensor_parallel_size=4"):
        EngineConfig(tensor_parallel_size=4, expert_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs Engine"):
        Engine.from_pretrained(paths[0], tensor_parallel_size=2)
    EngineConfig(tensor_parallel_size=2, tiers=KVTiers(host_ratio=1, preemption="swap"))
