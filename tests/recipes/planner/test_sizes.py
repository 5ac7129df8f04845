"""Engine sizes of a plan, against tensor-parallel engines on the CPU and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import recipes
from memsaver.ops.layout import round_up
from recipes.config.sections import shapes
from recipes.planner.planned_device import PAGE
from recipes.planner.sizes import GIB, engine_sizes, find_gpu
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from rollout import Engine
from tests.helpers.ranks import results, start_ranks
from tests.helpers.recipes.model_folders import model_folder

RANKS = 4
GPU = find_gpu("h100-80gb")[0]
# More ranks than KV heads, which are so large that their copies take pages of 2 MiB. The vocabulary
# is padded.
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
    """Return the bytes of this rank's weights and of a token in its pool, for every model."""
    sizes = []
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
        sizes.append((weights, engine.cache.layout.bytes_per_token))
    return sizes


def planned(
    fields: dict[str, Any], size: int, experts: int = 1, kind: str = "native"
) -> tuple[int, int]:
    words = ["driver=ray", f"cluster.n_gpus_per_node={size}", f"engine.tensor_parallel_size={size}"]
    words += [f"engine.expert_parallel={experts}", f"engine.kind={kind}", "device=auto"]
    sizes, _, per_token = engine_sizes(
        recipes.load("tiny", words), model_folder(fields), GPU, prompt_tokens=9
    )
    return sizes.weights, per_token


@pytest.mark.extended
def test_weights_and_token_bytes_equal_those_of_the_fullest_rank(tmp_path: Path) -> None:
    for name, fields in MODELS.items():
        (tmp_path / name).mkdir()
        describe_random_model(fields, toy_tokenizer([]), tmp_path / name)
    ranks = results(start_ranks(taken, RANKS, tmp_path / "store", str(tmp_path)))
    for name, *of_ranks in zip(MODELS, *ranks, strict=True):
        weights, per_token = max(of_ranks)
        plan = planned(MODELS[name], RANKS, PARTS.get(name, 1))
        assert plan == (round_up(weights, PAGE), per_token), name


@pytest.mark.parametrize("kind", ["native", "vllm"])
def test_rank_of_an_unsupported_model_has_an_even_share(kind: str) -> None:
    fields = FIELDS | {"model_type": "granitemoe", "num_local_experts": 4}
    whole, _ = planned(fields, 1, kind=kind)
    assert whole <= 4 * planned(fields, 4, 2, kind)[0] < whole + 4 * PAGE


def test_rank_has_its_experts_and_replicated_parts() -> None:
    """Divide the 256 experts of DeepSeek-V3 in fp32 by expert and by inner channels.

    All ranks have the products of the latents, the norms and the routers.
    """
    fields = shapes()["deepseek-v3"]
    (whole, _), (parts, _), (by_expert, _) = (
        planned(fields, *sizes) for sizes in ((1, 1), (8, 1), (8, 8))
    )
    latents = (1536 + 512 + 64) * 7168 + 1536 + 512 + 2 * 7168
    same = 4 * (61 * latents + 58 * 256 * 7168 + 7168)
    assert parts == by_expert and 0 <= 8 * parts - (whole + 7 * same) < 9 * PAGE


def test_step_of_experts_holds_outputs_of_chosen_experts() -> None:
    """Plan a prefill of 2,048 tokens with 8 of 128 experts each.

    An expert makes 768 and then 2,048 elements of a token, with 8 hidden states in addition.
    """
    words = ["model.dtype=bfloat16", "engine.max_prefill_tokens=2048", "engine.max_running=1"]
    recipe = recipes.load("tiny", [*words, "loop.prompts_per_step=100"])
    sizes, _, _ = engine_sizes(
        recipe, model_folder(shapes()["qwen3-30b-a3b"]), GPU, prompt_tokens=100
    )
    step = (2048 + 1) * (8 * (768 + 2048) + 8 * 2048) * 2  # one request decodes meanwhile
    assert sizes.generating == sizes.idle + GPU.workspace + round_up(step, PAGE)


@pytest.mark.parametrize("answer", [300, 30_000])
def test_growing_pool_begins_with_the_longest_request(answer: int) -> None:
    """Round prompt, answer and the page of padding up to whole pieces of the tag."""
    words = [f"sampling.max_tokens={answer}", "engine.kv_tokens=300000", "model.dtype=bfloat16"]
    recipe = recipes.load("tiny", words)
    sizes, _, per_token = engine_sizes(
        recipe, model_folder(shapes()["qwen2.5-7b"]), GPU, prompt_tokens=100
    )
    taken = (round_up(100 + answer, 16) + 16) * per_token
    assert sizes.grows and sizes.least - GIB < taken <= sizes.least


def test_hosted_engine_takes_the_measured_memory() -> None:
    """Compare with the GiB that vLLM freed at the 7B shape with a cache of 10.5 GiB.

    Padding of the vocabulary counts. Graphs and idle memory are among the contexts.
    """
    fields = shapes()["qwen2.5-7b"]
    tokens = int(10.5 * GIB / 57344) // 16 * 16  # 2 x 28 layers x 4 heads x 128 elements of bf16
    words = ["model.dtype=bfloat16", f"engine.kv_tokens={tokens}", "device=auto"]
    recipe = recipes.load("tiny", [*words, "engine.kind=vllm"])
    sizes, planned_tokens, per_token = engine_sizes(
        recipe, model_folder(fields), GPU, prompt_tokens=9
    )
    assert (planned_tokens, per_token, sizes.cuda_graph, sizes.idle) == (tokens, 57344, 0, 0)
    assert abs((sizes.weights + sizes.kv_cache) / GIB - 24.9) < 0.15
    padded = engine_sizes(
        recipe, model_folder(fields | {"vocab_size": 152192}), GPU, prompt_tokens=9
    )[0]
    more = engine_sizes(
        recipe, model_folder(fields | {"vocab_size": 152129}), GPU, prompt_tokens=9
    )[0]
    assert more.weights == padded.weights > sizes.weights
    two = ["driver=ray", "cluster.n_gpus_per_node=2", "engine.tensor_parallel_size=2"]
    shared = recipes.load("tiny", [*words, *two, "engine.kind=vllm"])
    half, _, per_token = engine_sizes(shared, model_folder(fields), GPU, prompt_tokens=9)
    assert per_token == 57344 // 2 and abs(half.kv_cache / sizes.kv_cache - 0.5) < 0.01
    table = fields["max_position_embeddings"] * 128 * 4  # table of rotations, whole on both ranks
    assert abs((half.weights - table) / (sizes.weights - table) - 0.5) < 0.01
    with pytest.raises(recipes.RecipeError, match="windows or states .* engine.kind=native"):
        engine_sizes(recipe, model_folder(MODELS["sliding"]), GPU, prompt_tokens=9)
