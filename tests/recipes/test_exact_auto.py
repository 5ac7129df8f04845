"""The recipe key `exact` at auto: where it is on, and runs that decide it."""

from __future__ import annotations

import types
from functools import partial
from pathlib import Path

import pytest

from recipes.config.load import load
from recipes.planner.command import plan_of
from recipes.run import continue_run, start_run
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from recipes.setup.preparation import with_exact_decided
from rollout import Engine
from tests.helpers.recipes.tiny_runs import rows

HALF = ("device=auto", "model.dtype=bfloat16", "exact=auto")
MIXTURE = "model.config.model_type=qwen3_moe model.config.num_experts=8"
TWO_RANKS = "driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2"
SMALL = (*HALF, "grpo.prompts_per_step=4", "grpo.samples_per_prompt=4", "eval.every=0")
SMALL += ("checkpoint.every=1", "checkpoint.export_every=null")
DECIDES = "recipes.setup.preparation.with_exact_decided"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", ""),
        ("model.dtype=float16", ""),
        (TWO_RANKS, ""),
        (MIXTURE, ""),
        ("loss.kl_coef=0.1", ""),
        ("model.dtype=float32", "excludes model.dtype=float32"),
        ("lora.rank=8", "excludes lora.rank=8"),
        ("engine.kind=vllm", "excludes engine.kind=vllm"),
        ("engine.kv_cache_dtype=fp8_e4m3", "excludes engine.kv_cache_dtype=fp8_e4m3"),
        ("correction.mode=bypass", "excludes correction.mode=bypass"),
        ("grpo.epochs=2", "excludes grpo.epochs=2"),
        ("grpo.mini_batches=2", "excludes grpo.mini_batches=2"),
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
    assert recipe.exact_mode is False  # not decided yet
    decided, reason = with_exact_decided(recipe, tmp_path)
    assert decided.exact == decided.exact_mode == (False if why else "warn")
    assert reason.startswith(why) and bool(reason) == bool(why)
    if not why:
        assert decided.scores_in_update and not decided.scores_before_update


def test_auto_needs_a_gpu_with_flash_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("tiny", HALF)
    describe_random_model(recipe.model.random_fields(), toy_tokenizer([]), tmp_path)
    for major, minor, exact in ((7, 5, False), (8, 0, "warn"), (9, 0, "warn")):
        gpu = types.SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, gpu=gpu: gpu)
        decided, why = with_exact_decided(recipe, tmp_path, "cuda:0")
        assert decided.exact == exact
        assert why == ("" if exact else "needs a GPU of compute capability 8.0")
        assert with_exact_decided(recipe, tmp_path, "cpu")[0].exact is False
    for value in ("true", "warn", "false"):
        named = load("tiny", [*HALF, f"exact={value}"])
        assert with_exact_decided(named, tmp_path, "cpu") == (named, "")


def test_plan_decides_auto_as_a_run_on_its_gpus() -> None:
    """Plan PPO with a divergence in the rewards, for which only plain runs need a pass."""
    decided = ["ppo.mini_batches=1", "cycle.overlap=[]", "trainer.keep_unsharded=false"]
    decided.append("model.config.num_hidden_layers=1")

    def stages(*words: str) -> list[str]:
        recipe = load("tiny-ppo", [*decided, "model.dtype=bfloat16", *words])
        return [stage.stage for stage in plan_of(recipe, "ppo", gpu=None).rows]

    assert "compute_log_prob" in stages("device=auto")
    assert "compute_log_prob" not in stages("device=auto", "exact=auto")
    assert "compute_log_prob" in stages("device=cpu", "exact=auto")


@pytest.mark.usefixtures("no_pictures")
def test_run_is_exact_as_decided_at_its_start_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decide on the CPU as for a GPU, then resume a run where auto is false."""
    plain, exact = tmp_path / "plain", tmp_path / "exact"
    start_run("tiny", [*SMALL, "steps=1"], plain)
    assert "; exact: off, because auto needs a GPU" in capsys.readouterr().out.replace("\n", " ")
    on_gpu = partial(with_exact_decided, device=None)
    with monkeypatch.context() as patch:
        patch.setattr(DECIDES, lambda recipe, model_dir, device: on_gpu(recipe, model_dir))
        start_run("tiny", [*SMALL, "steps=1"], exact)
        shown = capsys.readouterr().out.replace("\n", " ")
        assert "; exact: differences are counted" in shown and "has its bits" not in shown
        continue_run(plain, None, ["steps=2"])
        why = "; exact: off, because auto was off until the checkpoint"
        assert why in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.setattr(Engine, "product_report", lambda engine: "every product has its bits")
    continue_run(exact, None, ["steps=2"])
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "; exact: differences are counted" in shown and "every product has its bits" in shown
    assert load(exact / "recipe.yaml").exact == "auto"
    assert [row["unequal_tokens"] for row in rows(exact, "train")] == [0, 0]
    assert ["unequal_tokens" in row for row in rows(plain, "train")] == [False, False]


@pytest.mark.gpu
@pytest.mark.usefixtures("no_pictures")
def test_run_on_a_gpu_is_exact(tmp_path: Path) -> None:
    start_run("tiny", [*SMALL, "steps=2"], tmp_path / "run")
    assert [row["unequal_tokens"] for row in rows(tmp_path / "run", "train")] == [0, 0]
