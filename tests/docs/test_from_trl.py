"""Tests of docs/how-to/from-trl.md: TRL's names, and a script beside its recipe."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, TypeGuard

import pytest
import transformers

from recipes.config.load import load
from recipes.rewards import Answer, Rewards, RewardSet
from tests.helpers.docs.pages import ROOT
from tests.helpers.rollout.package_names import Wheel, names_in

PAGE = ROOT / "docs" / "how-to" / "from-trl.md"
FOLDER = ROOT / "examples" / "from_trl"
TRL = Wheel("trl")
SAME = {
    "max_steps": "steps",
    "num_generations": "loop.samples_per_prompt",
    "max_completion_length": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "reward_weights": "task.reward_weights",
    "beta": "loss.kl_coef",
    "learning_rate": "trainer.learning_rate",
    "warmup_steps": "trainer.warmup_steps",
    "vllm_gpu_memory_utilization": "engine.mem_fraction_static",
    "eval_steps": "eval.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "seed": "seed",
}


def arguments() -> dict[str, Any]:
    """Return the arguments of GRPOConfig in the script."""
    tree = ast.parse((FOLDER / "train.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if ast.unparse(node.func) == "GRPOConfig"]
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


def test_recipe_has_the_values_of_the_script() -> None:
    given, recipe = arguments(), load(FOLDER / "recipe.yaml")
    assert {name: recipe.value(key) for name, key in SAME.items()} == {
        name: given[name] for name in SAME
    }
    answers = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    assert recipe.answers_per_step == answers
    assert recipe.trackers == [given["report_to"]]


def names_of_trl() -> set[str]:
    """Return the arguments of GRPOConfig, which transformers has in part, and of GRPOTrainer."""
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    names |= names_in(TRL.classes("GRPOConfig")[0])
    trainer = next(node for node in ast.walk(TRL.classes("GRPOTrainer")[0]) if is_init(node))
    return names | {argument.arg for argument in trainer.args.args}


def is_init(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


@pytest.mark.skipif(TRL.may_skip, reason="TRL's sources are not here; make setup fetches them")
def test_options_on_the_page_are_names_of_trl() -> None:
    cells = "".join(re.findall(r"^\| ([^|]*) \|", PAGE.read_text(), re.M))
    named = set(re.findall(r"`([a-z]\w+)\b[^`]*`", cells))
    assert len(named) > 50 and named | set(arguments()) <= names_of_trl()


def test_rewards_of_the_example_score_texts_and_chats_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    functions = RewardSet(functions=["gsm8k_rewards:right", "gsm8k_rewards:brief"])
    chat = [{"role": "user", "content": "3 + 4?"}]
    answers = [
        Answer(prompt=prompt, text=text, answer="3 + 4 = 7\n#### 7")
        for prompt in ("3 + 4?", chat)
        for text in ("It is 7.", "8 " * 900)
    ]
    with Rewards(functions, workers=0) as rewards:
        assert [score.reward for score in rewards.score(answers)] == [2.0, 0.0] * 2
