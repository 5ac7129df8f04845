"""The engine's side of a plan, against tensor-parallel engines on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import recipes
from memsaver.ops.layout import round_up
from recipes.config.models import shapes
from recipes.planner.sizes import GIB, engine_sizes, find_gpu
from recipes.planner.tracing import PAGE
from recipes.setup.models import describe_random_model, toy_tokenizer
from rollout import Engine
from tests.helpers.ranks import results, start_ranks

RANKS = 4
GPU = find_gpu("h100-80gb")[0]
# More ranks than KV heads, large ones: their copies are pages of 2 MiB. The vocabulary is padded.
FIELDS: dict[str, Any] = {"vocab_size": 3001, "hidden_size": 512, "intermediate_size": 704}
FIELDS |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1}
FIELDS |= {"head_dim": 256, "tie_word_embeddings": False}
KINDS = {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": FIELDS | {"model_type": "llama", "attention_bias": True},
    "qwen3": FIELDS | {"model_type": "qwen3", "num_key_value_heads": 2},
    "experts": FIELDS
    | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 44, "mlp_only_layers": [1]},
    "by expert": FIELDS
    | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 45, "mlp_only_layers": [1], "num_key_value_heads": 4},
    "latent": FIELDS
    | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 6}
    | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 44}
    | {"kv_lora_rank": 512, "q_lora_rank": 768, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "linear": FIELDS
    | {"model_type": "qwen3_next", "num_experts": 0, "num_key_value_heads": 4}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "tied": FIELDS | {"model_type": "qwen2", "tie_word_embeddings": True},
    "sliding": FIELDS | {"model_type": "ministral", "num_key_value_heads": 2} | KINDS,
}


PARTS = {"by expert": RANKS, "latent": 2}  # expert_parallel


def taken(rank: int, folder: str) -> list[tuple[int, int]]:
    """Bytes of this rank's weights, and of a token in its pool, for every model."""
    found = []
    for name in MODELS:
        engine = Engine.from_pretrained(
            f"{folder}/{name}",
            load_weights=False,
            kv_tokens=64,
            tensor_parallel_size=RANKS,
            expert_parallel=PARTS.get(name, 1),
            group=dist.group.WORLD,
        )
        weights = engine.saver.report().tags["weights"].committed_bytes
        found.append((weights, engine.cache.layout.bytes_per_token))
    return found


def planned(fields: dict[str, Any], size: int, experts: int = 1) -> tuple[int, int]:
    words = ["driver=ray", f"cluster.n_gpus_per_node={size}", f"engine.tensor_parallel_size={size}"]
    words.append(f"engine.expert_parallel={experts}")
    sizes, _, per_token = engine_sizes(recipes.load("tiny", words), fields, GPU, prompt_tokens=9)
    return sizes.weights, per_token


@pytest.mark.extended
def test_weights_and_a_token_are_planned_as_the_fullest_rank_has_them(tmp_path: Path) -> None:
    for name, fields in MODELS.items():
        (tmp_path / name).mkdir()
        describe_random_model(fields, toy_tokenizer([]), tmp_path / name)
    ranks = results(start_ranks(taken, RANKS, tmp_path / "store", str(tmp_path)))
    for name, *of_ranks in zip(MODELS, *ranks, strict=True):
        weights, per_token = max(of_ranks)
        found = planned(MODELS[name], RANKS, PARTS.get(name, 1))
        assert found == (round_up(weights, PAGE), per_token), name


def test_a_rank_of_a_model_that_the_engine_does_not_compute_has_its_share() -> None:
    fields = FIELDS | {"model_type": "granite"}
    whole, _ = planned(fields, 1)
    assert whole <= 4 * planned(fields, 4)[0] < whole + 4 * PAGE


def test_a_rank_has_its_experts_and_what_all_of_them_hold() -> None:
    """DeepSeek-V3 in fp32: of 256 experts 256 / 8 by expert as by inner channels, and all ranks
    have the latents' products, the norms and the routers.
    """
    fields = shapes()["deepseek-v3"]
    (whole, _), (parts, _), (by_expert, _) = (
        planned(fields, *sizes) for sizes in ((1, 1), (8, 1), (8, 8))
    )
    latents = (1536 + 512 + 64) * 7168 + 1536 + 512 + 2 * 7168
    same = 4 * (61 * latents + 58 * 256 * 7168 + 7168)
    assert parts == by_expert and 0 <= 8 * parts - (whole + 7 * same) < 9 * PAGE


def test_a_step_of_experts_holds_what_each_makes_of_a_token() -> None:
    """Prefill of 2,048 tokens by 128 experts, of which 8 make 768 and then 2,048 elements of each;
    8 hidden states beside.
    """
    words = ["model.dtype=bfloat16", "engine.max_prefill_tokens=2048", "engine.max_running=1"]
    recipe = recipes.load("tiny", [*words, "grpo.prompts_per_step=100"])
    sizes, _, _ = engine_sizes(recipe, shapes()["qwen3-30b-a3b"], GPU, prompt_tokens=100)
    step = 2048 * (8 * (768 + 2048) + 8 * 2048) * 2
    assert sizes.generating == sizes.idle + GPU.workspace + round_up(step, PAGE)


@pytest.mark.parametrize("answer", [300, 30_000])
def test_a_pool_that_wakes_partly_begins_with_the_longest_request(answer: int) -> None:
    """Prompt, answer and the page of padding, in whole pieces of the tag: 1 and 2 GiB."""
    words = [f"sampling.max_tokens={answer}", "engine.kv_tokens=300000", "model.dtype=bfloat16"]
    recipe = recipes.load("tiny", words)
    sizes, _, per_token = engine_sizes(recipe, shapes()["qwen2.5-7b"], GPU, prompt_tokens=100)
    taken = (round_up(100 + answer, 16) + 16) * per_token
    assert sizes.grows and sizes.least - GIB < taken <= sizes.least


def test_a_hosted_engine_takes_what_was_measured() -> None:
    """What vLLM freed at the 7B shape, to the tenth that was printed; the cache of 10.5 GiB is its
    own figure. Padding of the vocabulary counts (65 rows more fit into its last page, 128 do not);
    graphs and idle memory are among the contexts.
    """
    fields = shapes()["qwen2.5-7b"]
    tokens = int(10.5 * GIB / 57344) // 16 * 16  # 2 x 28 layers x 4 heads x 128 elements of bf16
    words = ["model.dtype=bfloat16", f"engine.kv_tokens={tokens}", "device=auto"]
    recipe = recipes.load("tiny", [*words, "engine.kind=vllm"])
    sizes, found, per_token = engine_sizes(recipe, fields, GPU, prompt_tokens=9)
    assert (found, per_token, sizes.cuda_graph, sizes.idle) == (tokens, 57344, 0, 0)
    assert abs((sizes.weights + sizes.kv_cache) / GIB - 24.9) < 0.15
    padded = engine_sizes(recipe, fields | {"vocab_size": 152192}, GPU, prompt_tokens=9)[0]
    more = engine_sizes(recipe, fields | {"vocab_size": 152129}, GPU, prompt_tokens=9)[0]
    assert more.weights == padded.weights > sizes.weights
    two = ["driver=ray", "cluster.n_gpus_per_node=2", "engine.tensor_parallel_size=2"]
    shared = recipes.load("tiny", [*words, *two, "engine.kind=vllm"])
    half, _, per_token = engine_sizes(shared, fields, GPU, prompt_tokens=9)
    assert per_token == 57344 // 2 and abs(half.kv_cache / sizes.kv_cache - 0.5) < 0.01
    table = fields["max_position_embeddings"] * 128 * 4  # of rotations, whole on both
    assert abs((half.weights - table) / (sizes.weights - table) - 0.5) < 0.01
    with pytest.raises(recipes.RecipeError, match="windows or states .* engine.kind=native"):
        engine_sizes(recipe, MODELS["sliding"], GPU, prompt_tokens=9)
