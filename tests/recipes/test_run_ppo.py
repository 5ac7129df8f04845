"""Whole runs with critic, reference or adapters: learning, figures, memory and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.run import continue_run
from tests.helpers.recipes.tiny_runs import SMALL, SMALL_PPO, MakeRun, rows, same_rows, trace

STAGES = ["offload_optim", "offload_critic", "offload_critic_optim", "wake_weights", "sync_weights"]
STAGES += ["offload_params", "wake_kv_cache", "generate_sequences", "sleep"]
STAGES += ["reload_reference", "compute_ref_log_prob", "offload_reference"]
STAGES += ["reload_critic", "compute_values", "offload_critic"]
STAGES += ["reload_params", "compute_log_prob", "compute_reward", "reload_optim", "reload_critic"]
STAGES += ["reload_critic_optim", "compute_advantages", "update_critic", "update_actor"]
TRAINED = ("params", "optim", "critic", "critic_optim")


@pytest.fixture(scope="module")
def tiny(make_run: MakeRun) -> Path:
    """Run the packaged recipe with half of its prompts and 14 of its 24 steps."""
    return make_run("tiny-ppo", "loop.prompts_per_step=24", "steps=14")


def test_ppo_raises_the_reward(tiny: Path) -> None:
    """Compare the mean rewards of the first and the last five steps with a bound between them.

    An untrained model has 0.03, and the mean of 960 samples is within 0.03 of that. This seed ends
    at 0.84. test_run checks held-out problems, with GRPO.
    """
    rewards = [row["reward"] for row in rows(tiny, "train")]
    assert len(rewards) == 14
    assert sum(rewards[:5]) / 5 < 0.2 < sum(rewards[-5:]) / 5
    assert [row["step"] for row in rows(tiny, "eval")] == [0, 10, 14]


def test_critic_learns_and_policy_departs_from_reference(tiny: Path) -> None:
    train = rows(tiny, "train")
    assert train[0]["kl_to_reference"] == 0, "the policy starts as the reference, bit for bit"
    assert train[0]["value_explained_variance"] == 0, "a critic that estimates 0 explains nothing"
    assert min(row["kl_to_reference"] for row in train[1:]) > 0
    later = [row["value_explained_variance"] for row in train[8:]]
    assert sum(later) / len(later) > 0.15
    assert all(row["critic_grad_norm"] > 0 and row["value_loss"] > 0 for row in train)


def test_stages_follow_in_order_and_sides_hold_no_memory_of_each_other(tiny: Path) -> None:
    spans = sorted(
        (event for event in trace(tiny) if event["ph"] == "X"), key=lambda event: event["ts"]
    )
    step = next(event for event in spans if event["name"] == "step 3")
    inside = [
        event["name"] for event in spans if step["ts"] <= event["ts"] < step["ts"] + step["dur"]
    ]
    assert [name for name in inside if name in STAGES] == STAGES
    for row in rows(tiny, "train"):
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["weights"] > 0 and not any(rollout[tag] for tag in (*TRAINED, "reference"))
        assert all(train[tag] for tag in TRAINED) and train["params"] <= train["critic"] * 1.02
        assert not any(train[tag] for tag in ("reference", "weights", "kv_cache"))


def test_resumed_ppo_run_equals_an_uninterrupted_one(
    make_run: MakeRun, tmp_path: Path, no_pictures: None
) -> None:
    """Use several passes and mini-batches, a critic warm-up, and other resident tags on resume."""
    words = [*SMALL_PPO, "loop.epochs=2", "loop.mini_batches=2", "ppo.critic_warmup_steps=1"]
    straight, halves = make_run("tiny-ppo", *words, "steps=3"), tmp_path / "halves"
    shutil.copytree(make_run("tiny-ppo", *words, "steps=2"), halves)
    continue_run(halves, None, ["steps=3", "cycle.resident=[reference,critic]"])
    assert same_rows(halves, straight)
    first, second, third = rows(straight, "train")
    assert "loss" not in first and "loss" in second
    assert second["kl_to_reference"] == 0 < third["kl_to_reference"]


def test_grpo_with_reference_adds_the_kl_penalty_to_the_loss(make_run: MakeRun) -> None:
    held = rows(make_run("tiny", *SMALL, "steps=2", "loss.kl_coef=0.5"), "train")
    free = rows(make_run("tiny", *SMALL, "steps=5"), "train")
    assert held[0]["loss"] == free[0]["loss"] != 0 == held[0]["kl_to_reference"]
    assert held[1]["reward"] == free[1]["reward"], (
        "the divergence has no gradient at the initial weights"
    )
    # The losses are 0.1 to 1 in fp32, means over some 100 tokens, with an ulp of 1e-7. So their
    # difference, 1e-3 and more, is exact to 1e-4 of itself.
    difference = held[1]["loss"] - free[1]["loss"]
    assert difference == pytest.approx(0.5 * held[1]["kl_to_reference"], rel=1e-3, abs=1e-6)
    assert held[1]["kl_to_reference"] > 1e-3
    assert "kl_to_reference" not in free[1] and "compute_ref_log_prob" not in free[1]["stages"]
    assert held[1]["memory"]["train"]["reference"] == 0
    assert "reference" not in free[1]["memory"]["train"]
    assert "value_loss" not in held[1]


ADAPTERS = ["lora.rank=8", "trainer.learning_rate=5e-3", "loss.kl_coef=1e-3"]
ADAPTERS += ["loop.prompts_per_step=24", "loop.samples_per_prompt=8"]
ADAPTERS += ["eval.every=0", "checkpoint.every=0", "cycle.resident=[weights]"]


def test_adapters_move_with_the_parameters_and_the_policy_departs_from_its_base(
    make_run: MakeRun,
) -> None:
    """Keep the engine's weights resident, so that later syncs write adapted layers only.

    The engine serves merged weights: its log-probabilities equal the trainer's up to fp32 rounding.
    The base is the reference, without a separate model.
    """
    adapted = rows(make_run("tiny", *ADAPTERS, "steps=4"))
    assert len(adapted) == 4
    for row in adapted:
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["params"] == rollout["adapters"] == rollout["optim"] == 0
        assert 0 < train["adapters"] < train["params"] and train["optim"] == 2 * train["adapters"]
        assert "reference" not in train
    tokens = sum(row["tokens"] for row in adapted)
    assert 0 < sum(row["mismatch_mean"] * row["tokens"] for row in adapted) / tokens <= 1e-5
    assert max(row["mismatch_max"] for row in adapted) <= 5e-5
    distances = [row["kl_to_reference"] for row in adapted]
    assert distances[0] == 0 < 0.01 < distances[-1]
