"""Runs of the tiny recipe with `exact`."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.config.load import load
from recipes.errors import RecipeError
from recipes.run import continue_run, start_run
from tests.helpers.recipes.tiny_runs import MakeRun, exported, rows, same_rows
from tests.helpers.trainer_bridge.states import assert_same_bits

pytestmark = pytest.mark.usefixtures("no_pictures")
SMALL = ("loop.prompts_per_step=4", "loop.samples_per_prompt=4", "eval.every=0", "exact=true")
SMALL += (
    "trainer.learning_rate=0.01",
    "task.rewards=[tests.helpers.recipes.reward_functions:kept]",
)
SMALL += ("task.workers=0", "checkpoint.every=2", "checkpoint.export_every=0", "steps=3")
MIXTURE = "model.config.model_type=qwen3_moe model.config.num_experts=8 "
MIXTURE += "model.config.num_experts_per_tok=2 model.config.moe_intermediate_size=32 "
MIXTURE += "model.dtype=bfloat16 trainer.router_aux_loss_coef=0.001 loop.router_replay=true"


ADAPTERS = "lora.rank=8 cycle.alias=always model.dtype=bfloat16 trainer.learning_rate=0.01"


@pytest.mark.parametrize(
    "words", ["model.dtype=float32", "model.dtype=bfloat16", MIXTURE, ADAPTERS]
)
def test_every_step_is_exact(words: str, make_run: MakeRun) -> None:
    steps = rows(make_run("tiny", *SMALL, *words.split()), "train")
    assert len(steps) == 3
    for row in steps:
        assert row["unequal_tokens"] == row["mismatch_max"] == 0 < row["grad_norm"]
        assert "compute_log_prob" not in row["stages"]
    assert steps[0].get("mismatch_max_unreplayed", 0) == 0


def test_steps_of_adapters_move_adapters_alone_and_keep_one_base(make_run: MakeRun) -> None:
    for row in rows(make_run("tiny", *SMALL, *ADAPTERS.split()), "train"):
        held = row["memory"]["rollout"]
        assert row["sync"]["nbytes"] == held["adapters"] // 2 < held["params"]  # fp32 to bf16
        assert held["weights"] == 0 < held["adapter_slots"] and "merge_lost" not in row["sync"]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "engine.max_running=3 engine.max_prefill_tokens=16 trainer.optimizer_offload=true",
        "engine.kv_tokens=32 engine.page_size=4 engine.host_to_device_ratio=2",
        "engine.sleep_level=1 trainer.activation_checkpointing=layers cycle.overlap=[params,optim]",
        "cycle.resident=[params,optim,weights,kv_cache]",
        "cycle.alias=always cycle.hand_over=always",
    ],
)
def test_run_ends_with_the_same_bits(words: str, make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("tiny", *SMALL, "model.dtype=float32")
    start_run("tiny", (*SMALL, "model.dtype=float32", *words.split()), tmp_path / "run")
    assert_same_bits(exported(folder), exported(tmp_path / "run"))


def test_resumed_run_ends_with_the_same_bits(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("tiny", *SMALL, "model.dtype=float32")
    start_run("tiny", (*SMALL, "model.dtype=float32", "steps=2"), tmp_path / "run")
    continue_run(tmp_path / "run", None, ["steps=3"])
    assert same_rows(folder, tmp_path / "run")
    assert_same_bits(exported(folder), exported(tmp_path / "run"))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("lora.rank=8 lora.merge=true", "lora.rank=8: rounds, and exact=true compares bits"),
        ("engine.kv_cache_dtype=fp8_e4m3", "engine.kv_cache_dtype=fp8_e4m3: rounds"),
        ("engine.kind=vllm", "engine.kind=vllm: computes other bits than exact=true promises"),
        ("loop.epochs=2", "loop.epochs=2: excludes exact=true"),
        ("correction.mode=decoupled", "correction.mode=decoupled: has nothing to correct"),
    ],
)
def test_settings_that_change_bits_are_refused(words: str, rule: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("tiny", ["exact=true", *words.split()])
    assert rule in str(caught.value)
