"""The recipe key `exact` at auto: where it is on, and runs that decide it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.config.decisions import Decisions
from recipes.config.load import load
from recipes.config.recipe import Recipe
from recipes.logs.report_page import render_page
from recipes.planner.command import plan_of
from recipes.run import continue_run, start_run
from recipes.setup.model_decisions import first_decisions
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from recipes.setup.preparation import Setup
from rollout import Engine
from tests.helpers.recipes.tiny_runs import rows

HALF = ("device=auto", "model.dtype=bfloat16", "exact=auto")
MIXTURE = "model.config.model_type=qwen3_moe model.config.num_experts=8"
TWO_RANKS = "driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2"
SMALL = (*HALF, "loop.prompts_per_step=4", "loop.samples_per_prompt=4", "eval.every=0")
SMALL += ("checkpoint.every=1", "checkpoint.export_every=null")
DECIDES = "recipes.setup.preparation.first_decisions"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", ""),
        ("model.dtype=float16", ""),
        (TWO_RANKS, ""),
        (MIXTURE, ""),
        ("loss.kl_coef=0.1", ""),
        ("model.dtype=float32", "excludes model.dtype=float32"),
        ("lora.rank=8", ""),
        ("lora.rank=8 lora.merge=true", "excludes lora.rank=8"),
        ("engine.kind=vllm", "excludes engine.kind=vllm"),
        ("engine.kv_cache_dtype=fp8_e4m3", "excludes engine.kv_cache_dtype=fp8_e4m3"),
        ("correction.mode=bypass", "excludes correction.mode=bypass"),
        ("loop.epochs=2", "excludes loop.epochs=2"),
        ("loop.mini_batches=2", "excludes loop.mini_batches=2"),
        (
            f"{TWO_RANKS} cluster.n_gpus_per_node=4 engine.tensor_parallel_size=4",
            "excludes engine.tensor_parallel_size=4",
        ),
        (f"{MIXTURE} {TWO_RANKS} engine.expert_parallel=2", ""),
        ("model.config.model_type=ministral", "is for llama, mistral, mixtral, qwen2, qwen3, qwe"),
        ("model.config.model_type=granite", "needs a model that the native engine supports: "),
    ],
)
def test_auto_is_on_where_nothing_excludes_it(words: str, why: str, tmp_path: Path) -> None:
    recipe = load("tiny", [*HALF, *words.split()])
    describe_random_model(recipe.model.random_fields(), toy_tokenizer([]), tmp_path)
    made = first_decisions(recipe, tmp_path, None)
    assert made.exact == (False if why else "warn")
    off = f"exact: off, because auto {why}"
    assert made.reasons["exact"].startswith(off if why else "exact: differences are counted")
    if not why:
        setup: Any = SimpleNamespace(recipe=recipe, decisions=made)
        assert Setup.scores_in_update.fget(setup)  # type: ignore[attr-defined]


def test_auto_needs_a_gpu_with_flash_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("tiny", HALF)
    describe_random_model(recipe.model.random_fields(), toy_tokenizer([]), tmp_path)
    for major, minor, exact in ((7, 5, False), (8, 0, "warn"), (9, 0, "warn")):
        gpu = SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, gpu=gpu: gpu)
        made = first_decisions(recipe, tmp_path, "cuda:0")
        assert made.exact == exact
        why = "needs a GPU of compute capability 8.0"
        assert made.reasons["exact"].endswith("counted" if exact else why)
        assert first_decisions(recipe, tmp_path, "cpu").exact is False
    for value in ("true", "warn", "false"):
        named = load("tiny", [*HALF, f"exact={value}"])
        made = first_decisions(named, tmp_path, "cpu")
        said = {True: "exact: a difference ends the run", "warn": "exact: differences are counted"}
        assert made.exact == named.exact and made.reasons.get("exact") == said.get(named.exact)


def test_plan_decides_auto_as_a_run_on_its_gpus() -> None:
    """Plan PPO with a divergence in the rewards, for which only plain runs need a pass."""
    decided = ["loop.mini_batches=1", "cycle.overlap=[]", "trainer.keep_unsharded=false"]
    decided.append("model.config.num_hidden_layers=1")

    def stages(*words: str) -> list[str]:
        recipe = load("tiny-ppo", [*decided, "model.dtype=bfloat16", *words])
        return [stage.stage for stage in plan_of(recipe, "ppo", gpu=None).rows]

    assert "compute_log_prob" in stages("device=auto")
    assert "compute_log_prob" not in stages("device=auto", "exact=auto")
    assert "compute_log_prob" in stages("device=cpu", "exact=auto")


def on_gpu(recipe: Recipe, model_dir: Path, *before: Decisions) -> Decisions:
    return first_decisions(recipe, model_dir, None, *before)


@pytest.mark.usefixtures("no_pictures")
def test_run_is_exact_as_decided_at_its_start_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decide on the CPU as for a GPU, then resume a run where auto is false."""
    plain, exact = tmp_path / "plain", tmp_path / "exact"
    start_run("tiny", [*SMALL, "steps=1"], plain)
    off = "exact: off, because auto needs a GPU"
    assert off in capsys.readouterr().out.splitlines()
    made = (plain / "decisions.json").read_text()
    assert json.loads(made)["reasons"]["exact"] == off
    with monkeypatch.context() as patch:
        patch.setattr(DECIDES, lambda recipe, folder, _, *before: on_gpu(recipe, folder, *before))
        start_run("tiny", [*SMALL, "steps=1"], exact)
        shown = capsys.readouterr().out
        assert "\nexact: differences are counted\n" in shown and "has its bits" not in shown
        continue_run(plain, None, ["steps=2"])
        assert off in capsys.readouterr().out.splitlines()
        assert (plain / "decisions.json").read_text() == made and off in render_page(plain)
    monkeypatch.setattr(Engine, "product_report", lambda engine: "every product has its bits")
    continue_run(exact, None, ["steps=2"])
    shown = capsys.readouterr().out
    assert "\nexact: differences are counted\n" in shown and "every product has its bits" in shown
    assert load(exact / "recipe.yaml").exact == "auto"
    assert [row["unequal_tokens"] for row in rows(exact, "train")] == [0, 0]
    assert ["unequal_tokens" in row for row in rows(plain, "train")] == [False, False]


@pytest.mark.gpu
@pytest.mark.usefixtures("no_pictures")
def test_run_on_a_gpu_is_exact(tmp_path: Path) -> None:
    start_run("tiny", [*SMALL, "steps=2"], tmp_path / "run")
    assert [row["unequal_tokens"] for row in rows(tmp_path / "run", "train")] == [0, 0]
