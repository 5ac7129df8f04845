"""Engines of two and four ranks: answers equal transformers' (greedy) and one rank's (sampled).

Models compute in fp32. Ranks divide experts by inner channels, by expert, and both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from memsaver import StateError
from rollout import Completion, Engine, EngineConfig, KVTiers, Output, SamplingParams
from rollout.engine.stepping import joined
from rollout.model import load_model_config
from rollout.parallel import TensorParallel
from rollout.scheduling.samples import Step
from tests.helpers.case_selection import some
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
"""Kind and overrides of a tiny model, and `expert_parallel` on two and on four ranks."""


# The models have two KV heads (copied for four ranks), 199 tokens of vocabulary (padded), biases,
# tied embeddings, sliding layers, latent rows, linear layers, and numbers of experts that the ranks
# do not divide (the last of four ranks has none of five).
LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 12}
EIGHT = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
INNER = {"moe_intermediate_size": 13, "shared_expert_intermediate_size": 12}
NARROW = {"head_dim": 12, "hidden_size": 40, "intermediate_size": 10}
FIVE = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
MODELS: list[Model] = some(
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}, (1, 1)),
    ("ministral", {"sliding_window": 24, **LAYERS}, (1, 1)),
    (NEXT, {**LINEAR, **INNER, "num_experts": 6, "num_experts_per_tok": 3}, (2, 4)),
    (V2, {**MLA, **LATENT, **DEEPSEEK_MOE, **FIVE}, (1, 4)),
    whole=[
        (V3, {**MLA, **DEEPSEEK_MOE}, (2, 4)),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, **NARROW}, (1, 4)),
        ("llama", {"num_key_value_heads": 4}, (1, 1)),
        (MOE, {"moe_intermediate_size": 11, "num_experts": 5, "mlp_only_layers": [0]}, (2, 4)),
        ("qwen3", EIGHT, (1, 1)),
        (MOE, {"moe_intermediate_size": 14}, (1, 2)),
        (V3, {**MLA, "attention_bias": True}, (1, 1)),
        ("qwen2", {"head_dim": 12}, (1, 1)),
        (MOE, {"moe_intermediate_size": 12}, (1, 1)),
        (V2, MLA, (1, 1)),
        (NEXT, {**LINEAR, "attention_bias": True}, (1, 1)),
    ],
)
CONFIG: dict[str, Any] = {"kv_tokens": 384, "max_prefill_tokens": 48, "max_running": 8}
GREEDY = SamplingParams(max_tokens=6, temperature=0)
SAMPLED = SamplingParams(max_tokens=5, temperature=1.3, top_p=0.95, n=2, seed=5)


PROMPTS = random_prompts((60, 1, 17, 50))  # no prompt is complete after the first step


def config(path: str) -> dict[str, Any]:
    return CONFIG | {"return_routed_experts": load_model_config(path).has_experts}


def answers(engine: Engine, rank: int) -> list[Completion]:
    """Return greedy answers, whose requests a sleep preempts, and sampled ones.

    The other ranks have no part in requests and steps but to follow.
    """
    engine.steps.depth = engine.config.tensor_parallel_size // 2
    outputs = list[Output]()
    if not rank:
        for prompt in PROMPTS:
            engine.submit(prompt, GREEDY, stream=False)
    for _ in range(6):
        outputs += engine.follow() if rank else engine.step()
    engine.sleep(unfinished="recompute", tags=["kv_cache"])
    engine.wake_up()
    assert engine.scheduler.preemptions
    if rank:
        outputs += engine.follow()
    with contextlib.nullcontext() if rank else engine.leading():
        while engine.unfinished:
            outputs += engine.step()
    sampled = engine.generate((), SAMPLED) if rank else engine.generate(PROMPTS, SAMPLED)
    engine.check_integrity()
    return [sample for request in (*joined(outputs), *sampled) for sample in request]


def groups(rank: int) -> dict[int, dist.ProcessGroup]:
    """Return this rank's group of each size; all ranks create groups in the same order."""
    by_size: dict[int, dist.ProcessGroup] = {4: dist.group.WORLD}  # type: ignore[dict-item]
    for pair in ([0, 1], [2, 3]):
        group = dist.new_group(pair)
        if rank in pair:
            by_size[2] = group
    return by_size


def generate(rank: int, paths: list[str], divided: list[tuple[int, int]]) -> dict[int, Any]:
    """Return the answers of every model by size; `divided` has each model's `expert_parallel`."""
    by_size: dict[int, Any] = {}
    for size, group in groups(rank).items():
        by_size[size] = []
        for path, parts in zip(paths, divided, strict=True):
            sizes = {"tensor_parallel_size": size, "expert_parallel": parts[SIZES.index(size)]}
            engine = Engine.from_pretrained(path, group=group, **sizes, **config(path))
            by_size[size].append(answers(engine, dist.get_rank(group)))
    return by_size


@pytest.fixture(scope="module")
def paths(saved: Saved) -> list[str]:
    return [str(saved(kind, **overrides)[0]) for kind, overrides, _ in MODELS]


@pytest.fixture(scope="module")
def by_rank(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    store, divided = tmp_path_factory.mktemp("meet") / "store", [parts for _, _, parts in MODELS]
    return results(start_ranks(generate, 4, store, paths, divided), 400)


@pytest.mark.parametrize("model", range(len(MODELS)), ids=[kind for kind, _, _ in MODELS])
def test_answers_equal_those_of_single_rank_with_same_bits_on_all_ranks(
    paths: list[str], by_rank: list[dict[int, Any]], model: int, saved: Saved
) -> None:
    kind, overrides, _ = MODELS[model]
    alone = answers(Engine.from_pretrained(paths[model], **config(paths[model])), 0)
    check(saved(kind, **overrides)[1], PROMPTS, [[sample] for sample in alone[: len(PROMPTS)]])
    for size in SIZES:
        for rank in range(4):
            mine = by_rank[rank][size][model]
            assert_same(mine, alone, STATES_GAP if kind == NEXT else GAP)
            for sample, expected in zip(mine, alone, strict=True):
                assert np.array_equal(sample.routed_experts, expected.routed_experts)
            pairs = zip(mine, alone, strict=True)
            gap = torch.cat(
                [torch.tensor(a.logprobs) - torch.tensor(b.logprobs) for a, b in pairs]
            ).abs()
            assert gap.mean() <= MEAN_GAP
        assert by_rank[0][size][model] == by_rank[1][size][model], (
            "ranks differ in the bits of log-probabilities"
        )


def staged(rank: int) -> list[bool]:
    """Return whether captured collectives, which use staging memory, equal plain ones bitwise."""
    ranks = TensorParallel(2, dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    width = 151_936
    ranks.stage_captures(width, torch.bfloat16, torch.device("cpu"))
    hidden = torch.randn(3, 8192, 1024, generator=generator)  # 96 MiB, in three parts
    columns = torch.randn(130, width // 2, generator=generator).bfloat16()
    ids, rows = torch.randint(0, 14, (50,)), torch.randn(7, 33, generator=generator)

    def run_collectives() -> list[torch.Tensor]:
        return [ranks.sum(hidden.clone(), "x"), ranks.join(columns, width), ranks.embed(ids, rows)]

    plain = run_collectives()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = run_collectives()
    return [torch.equal(left, right) for left, right in zip(plain, captured, strict=True)]


def test_captured_collectives_through_staging_memory_equal_plain_ones(tmp_path: Path) -> None:
    assert results(start_ranks(staged, 2, tmp_path / "store")) == [[True] * 3] * 2


def summed(rank: int) -> list[torch.Tensor]:
    """Return exact sums over four ranks, plain and captured, and the additions in rank order."""
    ranks = TensorParallel(4, dist.group.WORLD, exact=True)
    ranks.stage_captures(1024, torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 5000, 1024, generator=generator).bfloat16()  # 39 MiB, in two parts
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    plain = ranks.sum(parts[rank].clone(), "x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = ranks.sum(parts[rank].clone(), "x")
    return [plain, captured, expected]


def test_exact_sum_of_four_ranks_adds_in_their_order(tmp_path: Path) -> None:
    for plain, captured, expected in results(start_ranks(summed, 4, tmp_path / "store")):
        assert torch.equal(plain, expected) and torch.equal(captured, expected)


# ---------------------------------------------------------------- decisions


def decide(rank: int, path: str) -> tuple[Any, ...]:
    """Return answers to requests that come, leave and end between steps, and those of a call."""
    group = dist.group.WORLD
    Engine.from_pretrained(path, tensor_parallel_size=2, group=group, **CONFIG)
    engine = Engine.from_pretrained(path, tensor_parallel_size=2, group=group, **CONFIG)
    others: list[Callable[[], Any]] = [
        lambda: engine.submit(PROMPTS[0], GREEDY), lambda: engine.abort(0), engine.step
    ]  # fmt: skip
    for call in others if rank else [engine.follow]:
        with pytest.raises(StateError, match="the first rank"):
            call()
    why = "failed on the first rank" if rank else "cannot sleep while the other ranks follow"
    with pytest.raises(StateError, match=why):
        engine.generate(PROMPTS, GREEDY, on_progress=lambda *_: engine.sleep())
    engine.check_integrity()
    outputs = list[Output]()
    if rank:
        outputs += engine.follow()
    else:
        left = engine.submit(PROMPTS[0], GREEDY)
        with engine.leading():
            outputs += engine.step() + engine.step() + engine.step()
            engine.submit(PROMPTS[2], SAMPLED)
            engine.abort(left)
            while engine.unfinished:
                outputs += engine.step()
        engine.submit(PROMPTS[3], GREEDY)  # the sleep ends it before the other rank knows of it
    engine.sleep(unfinished="abort", tags=["kv_cache"])
    engine.wake_up()
    outputs += engine.follow() if rank else engine.step()
    assert not engine.unfinished
    return joined(outputs), engine.generate(PROMPTS, GREEDY)


def test_first_rank_decides_and_other_ranks_follow(paths: list[str], tmp_path: Path) -> None:
    first, second = results(start_ranks(decide, 2, tmp_path / "store", paths[0]))
    assert first == second
    (left,), (drawn, _), (ended,) = first[0]
    assert (left.finish_reason, ended.finish_reason, ended.token_ids) == ("abort", "abort", [])
    engine = Engine.from_pretrained(paths[0], **CONFIG)
    engine.generate(PROMPTS, GREEDY)
    greedy = engine.generate(PROMPTS, GREEDY)
    assert left.token_ids == greedy[0][0].token_ids[: len(left.token_ids)] != []
    assert drawn.token_ids == engine.generate([PROMPTS[2]], SAMPLED)[0][0].token_ids
    for (mine,), (its,) in zip(first[1], greedy, strict=True):
        assert mine.token_ids == its.token_ids


# ---------------------------------------------------------------- failures


def lose_one(rank: int, path: str, how: str) -> str:
    # the timeout is for simultaneous work, after the barrier; a busy machine starts ranks apart
    group = dist.new_group(timeout=timedelta(seconds=2))
    engine = Engine.from_pretrained(path, tensor_parallel_size=2, group=group, **CONFIG)
    dist.barrier()

    usual, steps = engine.runner.forward, count()

    def forward(step: Step) -> Any:
        if rank == 1 and next(steps):
            if how == "die":
                os._exit(1)
            raise OSError("cosmic ray")
        return usual(step)

    engine.runner.forward = forward  # type: ignore[method-assign]
    try:
        engine.generate(random_prompts((5,)), GREEDY)
    except (RuntimeError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    with pytest.raises(RuntimeError, match="cannot generate: tensor-parallel rank"):
        engine.generate(random_prompts((5,)), GREEDY)
    return said


@pytest.fixture(scope="module")
def losing(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Peer]]:
    """Start the ranks of each way to lose one, which wait for their timeouts together."""
    stores = {how: tmp_path_factory.mktemp("lose") / "store" for how in ("raise", "die")}
    return {how: start_ranks(lose_one, 2, store, paths[0], how) for how, store in stores.items()}


@pytest.mark.parametrize(
    ("how", "named"), [("raise", "rank 1 failed: OSError: cosmic ray"), ("die", "rank 1 is silent")]
)
def test_rank_error_names_lost_rank_and_stage(
    losing: dict[str, list[Peer]], how: str, named: str
) -> None:
    ranks = losing[how]
    said = results(ranks[:1])[0]
    assert said.startswith(
        "RankError: tensor-parallel rank 0 of 2 gave up waiting in stage 'embedding': "
    )
    assert named in said
    if how == "raise":
        assert results(ranks[1:]) == ["OSError: cosmic ray"]
    ranks[1].kill()


def build_with_different_seeds(rank: int, path: str) -> None:
    sizes = CONFIG | {"seed": rank, "tensor_parallel_size": 2}
    Engine.from_pretrained(path, group=dist.group.WORLD, load_weights=False, **sizes)


def test_engine_refuses_ranks_with_different_configuration(
    paths: list[str], tmp_path: Path
) -> None:
    with pytest.raises(Failed, match=r"the model or EngineConfig of .* ranks \[1\] differs"):
        results(start_ranks(build_with_different_seeds, 2, tmp_path / "store", paths[0]))


# ---------------------------------------------------------------- invalid options


def test_engine_refuses_invalid_parallel_sizes(paths: list[str]) -> None:
    sizes = {"tensor_parallel_size": 2, "expert_parallel": 2}
    with pytest.raises(ValueError, match="expert_parallel=2 is for mixtures of experts"):
        Engine.from_pretrained(paths[0], **sizes, **CONFIG)
    with pytest.raises(ValueError, match="expert_parallel=3 must divide tensor_parallel_size=4"):
        EngineConfig(tensor_parallel_size=4, expert_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs Engine"):
        Engine.from_pretrained(paths[0], tensor_parallel_size=2)
    EngineConfig(tensor_parallel_size=2, tiers=KVTiers(host_ratio=1, preemption="swap"))
