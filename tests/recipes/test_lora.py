"""The tiny recipe with adapters, in a run whose engine keeps its weights: later syncs write the adapted ones only."""

import json

import pytest

from recipes.run import start_run

WORDS = ["lora.rank=8", "trainer.learning_rate=2e-2", "cycle.keep=[weights]", "steps=16", "eval.every=0"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Its rows."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    start_run("tiny", [*WORDS, "checkpoint.every=0"], folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_adapters_alone_raise_the_reward(adapted):
    rewards = [row["reward"] for row in adapted]
    assert len(rewards) == 16
    assert sum(rewards[:4]) / 4 < 0.15
    assert sum(rewards[-4:]) / 4 > 0.4


def test_the_rollout_serves_the_merged_weights(adapted):
    """Its log-probabilities are the trainer's, at fp32's distance."""
    tokens = sum(row["tokens"] for row in adapted)
    assert 0 < sum(row["gap_mean"] * row["tokens"] for row in adapted) / tokens <= 1e-5
    assert max(row["gap_max"] for row in adapted) <= 5e-5


def test_adapters_change_hands_with_the_parameters(adapted):
    for row in adapted:
        rollout, train = row["memory"]["rollout"], row["memory"]["train"]
        assert rollout["params"] == rollout["adapters"] == rollout["optim"] == 0
        assert 0 < train["adapters"] < train["params"]
        assert train["optim"] == 2 * train["adapters"]
