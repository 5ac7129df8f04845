"""The tiny recipe with adapters, in a run whose engine keeps its weights: later syncs write the adapted ones only."""

from __future__ import annotations

from pathlib import Path

import pytest

import recipes
from recipes.errors import RecipeError
from recipes.preparation import prepare
from tests.helpers.recipes.runs import MakeRun, Row, rows

WORDS = [
    *("grpo.prompts_per_step=24", "steps=14", "eval.every=0", "checkpoint.every=0", "cycle.keep=[weights]"),
    *("lora.rank=8", "trainer.learning_rate=2e-2", "grpo.kl_coef=1e-3"),
]


@pytest.fixture(scope="module")
def adapted(make_run: MakeRun) -> list[Row]:
    return rows(make_run("tiny", *WORDS))


def test_adapters_alone_raise_the_reward(adapted: list[Row]) -> None:
    rewards = [row["reward"] for row in adapted]
    assert len(rewards) == 14
    assert sum(rewards[:4]) / 4 < 0.1 and sum(rewards[-4:]) / 4 > 0.2


def test_the_rollout_serves_the_merged_weights(adapted: list[Row]) -> None:
    """Its log-probabilities are the trainer's, at fp32's distance."""
    tokens = sum(row["tokens"] for row in adapted)
    assert 0 < sum(row["gap_mean"] * row["tokens"] for row in adapted) / tokens <= 1e-5
    assert max(row["gap_max"] for row in adapted) <= 5e-5


def test_adapters_change_hands_with_the_parameters(adapted: list[Row]) -> None:
    for row in adapted:
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["params"] == rollout["adapters"] == rollout["optim"] == 0
        assert 0 < train["adapters"] < train["params"]
        assert train["optim"] == 2 * train["adapters"]


def test_the_base_is_the_reference_without_a_model_of_its_own(adapted: list[Row]) -> None:
    distances = [row["kl_to_reference"] for row in adapted]
    assert distances[0] == 0 < 0.01 < distances[-1]
    assert all(tag != "reference" for row in adapted for tag in row["memory"]["train"])


def test_layers_that_the_model_has_not_are_named_before_anything_is_written(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    fields = {"model_type": "deepseek_v2", "num_key_value_heads": 4, "first_k_dense_replace": 2, **latent}
    words = [f"model.config.{key}={value}" for key, value in fields.items()]
    with pytest.raises(RecipeError) as caught:
        prepare(recipes.load("tiny", [*words, "lora.rank=2"]), tmp_path)
    message = str(caught.value)
    assert message.startswith("lora.target_modules=[q_proj,k_proj,v_proj,")
    assert ": the model has no layers q_proj, k_proj, v_proj; " in message
    assert message.endswith("set lora.target_modules=[o_proj,gate_proj,up_proj,down_proj]")
    assert not list(tmp_path.iterdir())
