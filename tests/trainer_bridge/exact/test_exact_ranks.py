"""An exact trainer computes the bits of tensor-parallel engines, on one rank and on two."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout import Completion, Engine
from rollout.ops.row_wise import linear as engine_linear
from rollout.ops.row_wise import silu_mul
from rollout.ops.torch_attention import attend, hidden_keys
from tests.helpers.case_selection import some
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.trainer_bridge.exact_ranks import sample, sampled_batch, unequal_in_rounds
from trainer_bridge import Trainer, TrainerConfig
from trainer_bridge.ops.exact import linear

# Two KV heads, which four ranks copy; 199 tokens of vocabulary, which no size divides; ranks with
# fewer than 16 rows of a weight; biases of all products of attention; experts in unequal parts,
# which two of four ranks share.
MODELS: list[tuple[str, str, dict[str, Any]]] = some(
    ("llama", "bfloat16", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", "float32", {"intermediate_size": 24}),
    ("qwen3_moe", "bfloat16", {"num_experts": 7, "num_experts_per_tok": 3}),
    whole=[
        ("qwen3_moe", "float32", {"num_experts": 7, "num_experts_per_tok": 3}),
        ("mixtral", "bfloat16", {"num_local_experts": 6}),
        ("qwen3", "float32", {"head_dim": 4}),
        ("qwen3", "bfloat16", {"head_dim": 16}),
        ("mistral", "float32", {"sliding_window": 37}),
        ("llama", "float32", {"attention_bias": True}),
    ],
)
IDS = [f"{family}-{dtype}" for family, dtype, _ in MODELS]
SIZES = (2, 4)
PARTS = {"qwen3_moe": 2}  # of experts, by family
PROMPTS = random_prompts((3, 20, 257, 40, 1))
WAYS: list[dict[str, Any]] = [
    {"max_prefill_tokens": 512},
    {"max_prefill_tokens": 50, "prefix_cache": False, "max_running": 2},
]
SETTINGS: dict[str, Any] = {"kv_tokens": 2048, "page_size": 4}


def trainer_config(path: Path | str, dtype: Any, **changes: Any) -> TrainerConfig:
    return TrainerConfig(
        model_path=str(path), param_dtype=dtype, exact=True, micro_batch_size=2, threads=1,
        learning_rate=1e-2, **changes,
    )  # fmt: skip


def generate(
    rank: int, models: list[tuple[str, str, int]]
) -> dict[int, list[list[list[Completion]]]]:
    """Return the answers of engines of four ranks, for each model and way to batch.

    The last two ranks also return those of engines of two. `models` are paths, dtypes, and parts of
    the experts.
    """
    groups = {4: dist.group.WORLD}
    pair = dist.new_group([2, 3])
    if rank in (2, 3):
        groups[2] = pair
    return {
        size: [
            [answers(path, dtype, size, parts, group, way) for way in WAYS]
            for path, dtype, parts in models
        ]
        for size, group in groups.items()
    }


def answers(
    path: str, dtype: str, size: int, parts: int, group: Any, way: dict[str, Any]
) -> list[Completion]:
    engine = Engine.from_pretrained(
        path, dtype=getattr(torch, dtype), tensor_parallel_size=size, expert_parallel=parts,
        group=group, exact=True, **SETTINGS, **way,
    )  # fmt: skip
    return sample(engine, PROMPTS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = [tmp_path_factory.mktemp("model") for _ in MODELS]
    for folder, (family, _, fields) in zip(folders, MODELS, strict=True):
        save_tiny(folder, family, **fields)
    return [str(folder) for folder in folders]


@pytest.fixture(scope="module")
def by_rank(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    store = tmp_path_factory.mktemp("meet") / "store"
    models = [
        (path, dtype, PARTS.get(family, 1))
        for path, (family, dtype, _) in zip(paths, MODELS, strict=True)
    ]
    return results(start_ranks(generate, 4, store, models), 400)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", range(len(MODELS)), ids=IDS)
def test_trainer_computes_the_bits_of_tensor_parallel_engines(
    model: int, size: int, paths: list[str], by_rank: list[dict[int, Any]]
) -> None:
    own = (ranks[size][model] for ranks in by_rank if size in ranks)
    first, *others = chain.from_iterable(own)
    for answers in others:
        assert [a.logprobs for a in answers] == [a.logprobs for a in first]
    batch = sampled_batch(PROMPTS, first)
    family, dtype, _ = MODELS[model]
    for ranks in (1, size):
        parts = min(ranks, PARTS.get(family, 1))
        shares = {"exact_ranks": ranks, "exact_expert_parallel": parts}
        trainer = Trainer(trainer_config(paths[model], dtype, **shares))
        assert (trainer.compute_log_prob(batch) == batch.rollout_logprobs) is (ranks == size)
        if ranks == size:
            assert trainer.update_actor(batch)["unequal_tokens"] == 0
        trainer.close()
        trainer.saver.close()


def test_two_ranks_compute_the_bits_of_their_engines_with_unequal_parts_of_a_batch(
    paths: list[str], tmp_path: Path
) -> None:
    engines = [{**SETTINGS, **way} for way in WAYS]
    arguments = trainer_config(paths[0], "bfloat16", exact_ranks=2), engines, PROMPTS
    ranks = results(start_ranks(unequal_in_rounds, 2, tmp_path / "store", *arguments))
    assert ranks == [[0, 0]] * 2


def test_trainer_refuses_engines_of_another_size(paths: list[str]) -> None:
    trainer = Trainer(trainer_config(paths[0], "float32", exact_ranks=2))
    rule = (
        "tensor_parallel_size=1 and expert_parallel=1, and the trainer exact_ranks=2 and exact_ex"
    )
    with pytest.raises(ValueError, match=rule):
        trainer.connect([Engine.from_pretrained(paths[0], kv_tokens=64)])
    trainer.close()
    trainer.saver.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [10, 24, 80, 199])
def test_parts_of_a_product_and_of_the_activation_have_the_bits_of_the_whole(
    outputs: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (37, 48), (outputs, 48), (outputs,)
    x, weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    whole = engine_linear(x, weight, bias)
    for ranks in (2, 4, 8):
        parts = zip(weight.chunk(ranks), bias.chunk(ranks), strict=True)
        columns = [engine_linear(x[:5], *part) for part in parts]
        assert torch.equal(torch.cat(columns, 1), whole[:5])
        activated = [silu_mul(part, part) for part in columns]
        assert torch.equal(torch.cat(activated, 1), silu_mul(whole, whole)[:5])


@pytest.mark.parametrize("width", [4, 5, 10, 17])
@pytest.mark.parametrize("length", [7, 40, 130])
def test_attention_of_one_head_and_of_one_query_has_the_bits_of_the_whole(
    length: int, width: int
) -> None:
    """A rank may hold a single head, and decode computes a single query."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, width, generator=draw) for heads in (4, 2, 2))
    hidden = hidden_keys(length, length, None, q.device)
    whole = attend(q, k, v, hidden, 0.3)
    for head in range(4):
        one, key, value = (
            part[:, :, at : at + 1].contiguous()
            for part, at in zip((q, k, v), (head, head // 2, head // 2), strict=True)
        )
        assert torch.equal(attend(one, key, value, hidden, 0.3), whole[:, :, head : head + 1])
        last = attend(one[:, -1:], key, value, hidden[-1:], 0.3)
        assert torch.equal(last, whole[:, -1:, head : head + 1])


def test_gradients_of_a_product_of_ranks_are_those_of_one_product() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draw) for shape in ((2, 7, 48), (32, 48), (32,))]
    slope = torch.randn(2, 7, 32, generator=draw)
    gradients = []
    for ranks in (1, 4):
        ours = [tensor.clone().requires_grad_() for tensor in inputs]
        out = linear(*ours, ranks)
        out.backward(slope)
        torch.testing.assert_close(out, linear(*inputs))
        gradients.append([tensor.grad for tensor in ours])
    torch.testing.assert_close(*gradients)
