"""Plans against measurements on GPUs, remedies, output, and wrong commands."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import recipes
from recipes.cli import main
from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.logs.run_folder import MARKS
from recipes.planner.command import plan_of, print_plan
from recipes.planner.memory_plan import WRITTEN_AT_ONCE, MemoryPlan, Shortage
from recipes.planner.remedies import remedied
from recipes.planner.sizes import GIB, MIB, find_gpu
from recipes.setup.preparation import prepare
from tests.helpers.docs.pages import ROOT
from tests.helpers.recipes.tiny_runs import SMALL
from trainer_bridge.sync import MESSAGE_BYTES

PLANS = ROOT / "examples" / "plans"
Capture = pytest.CaptureFixture[str]

ONE_KEY_HEAD = {
    "model_type": "qwen3_next",
    "vocab_size": 3000,
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "num_experts": 0,
    "head_dim": 32,
    "linear_num_key_heads": 1,
}
# 1.2 GiB of parameters in two layers
LARGE = ["device=auto", "model.config.hidden_size=2048", "model.config.vocab_size=150000"]
LARGE.append("trainer.micro_batch_size=1")
TP = "engine.tensor_parallel_size"
EIGHT = ["qwen2.5-7b", "cluster.n_gpus_per_node=8"]
PAIR = ["tiny", "driver=ray", "cluster.n_gpus_per_node=2", f"{TP}=2"]
# Peak MiB of the device by stage, measured for these commands (docs/benchmarks.md).
MEASURED = [
    "qwen2.5-0.5b cycle.resident=[] cycle.overlap=[] --gpu h100-80gb",
    "qwen2.5-0.5b model.shape=smollm2-135m cycle.resident=[] cycle.overlap=[] --gpu h100-80gb",
    "qwen2.5-7b cycle.resident=[] cycle.alias=never cycle.overlap=[] --gpu h200-141gb",
]
MEASURED_MIB = {
    "wake_weights": (4936.4, 2870.4, 31268.4),
    "sync_weights": (4936.4, 2870.4, 31268.4),
    "offload_params": (4936.4, 2870.4, 31268.4),
    "wake_kv_cache": (3896.4, 3838.4, 18612.4),
    "generate_sequences": (3970.4, 3890.4, 18680.4),
    "sleep": (3970.4, 3890.4, 18680.4),
    "reload_params": (3992.4, 2612.4, 16742.4),
}
# Not measured since the trainer stopped building logits of the whole vocabulary.
UNMEASURED = {
    "offload_optim",
    "compute_reward",
    "reload_optim",
    "compute_advantages",
    "update_actor",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.extended] * ("h200" not in case)) for case in MEASURED],
)
def test_plan_is_at_most_3_percent_above_and_1_percent_below_measurements(
    case: str,
) -> None:
    words, _, gpu = case.partition(" --gpu ")
    name, *overrides = words.split()
    plan = plan_of(recipes.load(name, overrides), name, gpu=gpu)
    planned = {stage.stage: stage.device_bytes / MIB for stage in plan.stages}
    assert planned.keys() == MEASURED_MIB.keys() | UNMEASURED
    for stage, row in MEASURED_MIB.items():
        measured = row[MEASURED.index(case)]
        assert 0.99 * measured <= planned[stage] <= 1.03 * measured, stage


def test_plan_of_forced_overlap_equals_measurement() -> None:
    """Compare with 31.9 GiB on two H200 (docs/benchmarks.md)."""
    words = ["cluster.n_gpus_per_node=2", "engine.mem_fraction_static=0.92", "driver=ray"]
    words += ["trainer.micro_batch_size=2"]
    plan = plan_of(recipes.load(PLANS / "qwen2.5-7b-h200.yaml", words), "forced", gpu=None)
    assert plan.decisions.overlap == ("params", "optim")
    sleep = next(stage for stage in plan.stages if stage.stage == "sleep")
    assert sleep.device_bytes / GIB == pytest.approx(31.9, rel=0.03)


def test_plan_without_emptied_cache_equals_measurement_at_every_stage() -> None:
    """Compare with 47.74 GiB at each stage on one H200 with two Ray actors."""
    words = ["driver=ray", "trainer.activation_checkpointing=layers"]
    recipe = recipes.load("qwen3-30b-a3b-cut", words)
    plan = plan_of(recipe, "qwen3-30b-a3b-cut", gpu="h200-141gb")
    assert not plan.decisions.overlap
    assert len(plan.stages) == 9
    for stage in plan.stages:
        assert 0.99 * 47.74 <= stage.device_bytes / GIB <= 1.03 * 47.74, stage.stage


def test_plan_counts_copies_of_checkpoints_where_the_host_has_room() -> None:
    """Expect the bytes of masters and moments in fp32."""
    words = [*LARGE, "cycle.resident=auto", "checkpoint.every=0"]
    plain, copied, full = (
        plan_of(recipes.load("tiny", [*words, *more]), "copies", gpu=None)
        for more in ([], ["checkpoint.every=1"], ["checkpoint.every=1", "cluster.host_gib=7"])
    )
    tags = plain.stages[-1].tags
    held = tags["params"] + tags["optim"]
    assert held > 3 * GIB and abs(copied.host_bytes - plain.host_bytes - held) < 16 * MIB
    assert full.host_bytes == plain.host_bytes
    assert [WRITTEN_AT_ONCE in plan.notes for plan in (plain, copied, full)] == [False, False, True]
    assert plain.fits and copied.fits and full.fits


APART = ["device=auto", "driver=ray", "cluster.rollout_gpus=1", "cluster.colocate=false"]


@pytest.mark.extended
def test_plan_of_a_trainer_alone_on_its_gpu_equals_measurement() -> None:
    """Compare with the 25.83 GiB that torch held after updates on one H100."""
    words = [*APART, "cluster.n_gpus_per_node=1", "loop.prompts_per_step=16"]
    words += ["trainer.optimizer=adamw_8bit", "trainer.dtype=bfloat16", "sampling.max_tokens=512"]
    words += ["trainer.micro_batch_size=4"]
    recipe = recipes.load(PLANS / "qwen2.5-7b-8xh100.yaml", words)
    plan = plan_of(recipe, "apart", gpu="h100-80gb")
    (update,) = (stage for stage in plan.stages if stage.stage == "update_actor")
    assert 0.99 * 25.83 <= update.torch["trainer"] / GIB <= 1.03 * 25.83


@pytest.mark.parametrize("colocate", [True, False])
def test_gpu_of_the_engine_alone_is_planned_without_the_trainers_tags(colocate: bool) -> None:
    """Plan both kinds of GPUs; their bytes must not depend on the other kind."""
    words = [*APART[:3], f"cluster.colocate={colocate}", "cycle.resident=[]", "cycle.overlap=[]"]
    words += ["model.config.hidden_size=2048", "engine.kv_tokens=null", "model.dtype=bfloat16"]
    make = partial(plan_of, name="apart", gpu="h100-80gb")
    plan = make(recipes.load("tiny", [*words, "trainer.dtype=bfloat16"]))
    wider = make(recipes.load("tiny", [*words, "cluster.rollout_gpus=2"]))
    engine = {"weights", "kv_cache", "cuda_graph"}
    assert (plan.devices, plan.rollout_devices, wider.rollout_devices) == (1, 1, 2)
    assert {tag for stage in plan.rollout_stages for tag in stage.tags} == engine
    held = {tag for stage in plan.stages for tag, nbytes in stage.tags.items() if nbytes}
    assert held == {"params", "optim"} | (engine if colocate else set())
    for stage, other in zip(plan.rollout_stages, wider.rollout_stages, strict=True):
        # Two engines share the requests that one holds, so their pools may be smaller.
        assert stage.tags["weights"] == other.tags["weights"]
        assert other.device_bytes <= stage.device_bytes < plan.peak.device_bytes
    assert wider.peak.device_bytes > plan.peak.device_bytes


def test_plan_fits_only_if_both_kinds_of_gpus_fit(capsys: Capture) -> None:
    words = ["plan", "tiny", *SMALL, *APART, "cycle.resident=auto"]
    assert main([*words, "engine.kv_tokens=352000000"]) == 3
    printed = capsys.readouterr().out
    assert "does not fit: sync_weights (engine's GPU) is short of" in printed
    remedy = re.search(r"set (engine\.kv_tokens=\d+)", printed)
    assert remedy is not None, printed
    assert main([*words, remedy[1]]) == 0
    printed = capsys.readouterr().out
    assert "1 with a trainer and 1 with an engine only" in printed
    assert "engines stay awake on GPUs of their own\nleaves: nothing\n" in printed
    assert main([*words, "--gpu", "h100-80gb:8"]) == 2
    assert "set cluster.n_gpus_per_node instead" in capsys.readouterr().err


def test_plan_of_several_machines_counts_their_gpus_and_the_buffers_of_messages(
    capsys: Capture,
) -> None:
    words = [*APART[:2], "cluster.n_gpus_per_node=2", "cycle.resident=[]", "cycle.overlap=[]"]
    far = ["cluster.rollout_nodes=2", "cluster.colocate=false"]
    plan = plan_of(recipes.load("tiny", [*words, *far]), name="far", gpu="h100-80gb")
    assert (plan.devices, plan.rollout_devices, plan.machines) == (2, 4, 3)
    near = plan_of(
        recipes.load("tiny", [*words, "cluster.rollout_gpus=4", far[1]]),
        name="near",
        gpu="h100-80gb",
    )
    for stage, other in zip(plan.rows, near.rows, strict=True):
        assert stage.contexts - other.contexts == 4 * MESSAGE_BYTES
    assert main(["plan", "tiny", *words, *far]) == 0
    printed = capsys.readouterr().out
    assert "2 with a trainer and 4 with an engine only; 3 machines" in printed
    assert "NCCL's memory for syncs between machines is not in the plan" in printed


def test_plan_that_does_not_fit_exits_3_and_its_remedy_fits(capsys: Capture) -> None:
    assert main(["plan", "tiny", *SMALL, "device=auto", "engine.kv_tokens=352000000"]) == 3
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    remedy = re.search(r"set engine\.kv_tokens=(\d+)", printed)
    assert remedy is not None, printed
    words = [*SMALL, f"engine.kv_tokens={remedy[1]}"]
    plan = plan_of(recipes.load("tiny", words), "tiny", gpu="h100-80gb")
    assert plan.fits and plan.kv_tokens == int(remedy[1])
    assert 0 <= plan.most_kv_tokens - plan.kv_tokens < 1e-3 * plan.kv_tokens, (
        "the remedy is far below the largest pool that fits"
    )


def test_remedy_of_an_unstaged_wake_up_is_a_smaller_pool_which_fits() -> None:
    def planned(fraction: str, staged: bool) -> MemoryPlan:
        words = ["engine.kv_tokens=null", "cycle.overlap=[]"]
        recipe = recipes.load("tiny", [*LARGE, *words, f"engine.mem_fraction_static={fraction}"])
        return plan_of(recipe, "tiny", gpu=str(20 * GIB), staged=staged)

    assert planned("0.86", staged=True).fits
    (need,) = planned("0.86", staged=False).needs
    remedy = re.search(r"short of .*; set engine\.mem_fraction_static=([\d.]+), or", need)
    assert remedy is not None and planned(remedy[1], staged=False).fits, need


def test_plan_reports_the_faults_that_a_run_is_refused_for(tmp_path: Path) -> None:
    """Plan and prepare with a pool, and with a context, that are too small for a request."""
    words = ["cycle.overlap=[]", "engine.kv_tokens=16", "sampling.max_tokens=20"]
    with pytest.raises(recipes.RecipeError) as refused:
        prepare(recipes.load("tiny", words), tmp_path)
    (need,) = plan_of(recipes.load("tiny", words), "tiny", gpu=None).needs
    for part in need.split("; "):
        assert "tokens" in part and part in str(refused.value)
    for make in (lambda recipe: prepare(recipe, tmp_path), partial(plan_of, name="tiny", gpu=None)):
        with pytest.raises(recipes.RecipeError, match="of 9 .* context of 64 .*max_tokens=55"):
            make(recipes.load("tiny", ["sampling.max_tokens=60"]))


def test_remedy_names_only_changes_that_reduce_its_shortage_and_increase_no_other() -> None:
    """Leave out changes that free nothing, are impossible, or cause another shortage."""
    recipe = recipes.load("tiny", ["cycle.resident=[]", "device=auto"])
    ways = [("trainer.micro_batch_size", 1), ("lora.rank", 8), ("sampling.max_tokens", 1)]
    ways += [("trainer.optimizer_offload", True), ("trainer.threads", 0)]
    short = Shortage(GIB, "update_actor is short of 1.0 GiB", "take a larger GPU", ways)
    planned = plan_of(recipe, "tiny", gpu=None)

    def replan(changed: Recipe, made: Decisions) -> MemoryPlan:
        if changed.lora.rank:
            raise recipes.RecipeError("no such layers")
        host = {"host": short} if changed.trainer.optimizer_offload else {}
        less = GIB if changed.trainer.micro_batch_size == 1 else GIB - 1
        return replace(planned, shortages={"trainer": Shortage(less, "", ""), **host})

    plan = remedied(replace(planned, shortages={"trainer": short}), recipe, replan)
    assert plan.needs == [f"{short.text}; set sampling.max_tokens=1, or take a larger GPU"]


def test_command_prints_draws_and_writes_a_plan(tmp_path: Path, capsys: Capture) -> None:
    for name in MARKS:
        (tmp_path / name).touch()
    assert main(["plan", "tiny", "--picture", str(tmp_path / "no" / "where.png")]) == 2
    message = "where.png: cannot be written: No such file or directory; name a place"
    assert message in capsys.readouterr().err
    picture = tmp_path / "plan.png"
    words = ["plan", "tiny", *SMALL]
    assert main([*words, "device=auto", "--picture", str(picture), "--into", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "update_actor" in printed and "fits:" in printed
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["gpu_bytes"] == find_gpu("h100-80gb")[0].total
    assert {"stage", "device_bytes", "tags", "host_bytes", "used_bytes"} == set(
        written["stages"][0]
    )
    assert main([*words, "cluster.host_gib=2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny: MiB of host memory")
    assert "planned for: cpu, 2.00 GiB of host memory\n" in printed and "contexts" not in printed
    assert main([*words, "cluster.host_gib=0.5"]) == 3
    assert re.search(r"[GM]iB of host memory; .*take a machine with", capsys.readouterr().out)


def test_table_of_a_narrow_terminal_cuts_no_number_and_no_heading() -> None:
    """Print a plan with all eight tags; up to 80 columns show sums."""
    plan = plan_of(recipes.load("tiny-ppo", ["loss.kl_coef=0.1"]), "tiny-ppo", gpu="h100-80gb")
    for width in (60, 80, 120, 200):
        console = Console(width=width, file=io.StringIO())
        print_plan(plan, console)
        lines = console.file.getvalue().splitlines()
        assert "\u2026" not in "".join(lines)
        assert width < 80 or max(map(len, lines)) <= width
        head = next(number for number, line in enumerate(lines) if line.startswith("stage "))
        assert ("trainer" in lines[head]) == (width <= 80) != ("reference" in lines[head])
        for line, stage in zip(lines[head + 1 :], plan.stages, strict=False):
            name, *values = line.split()
            assert name == stage.stage and f"{stage.device_bytes / MIB:.0f}" in values
            assert values[-2] == f"{plan.gpu.contexts / MIB:.0f}"
            assert len(values) == len(lines[head].split()) - 1 + (width == 200)


def test_text_in_square_brackets_is_printed_unchanged() -> None:
    plan = plan_of(recipes.load("tiny", SMALL), "a[bold]b", gpu=None)
    made = replace(plan.decisions, reasons={"resident": "stays: [optim]"})
    shortages = {"trainer": Shortage(1, "short", "set cycle.resident=[params]")}
    plan = replace(plan, decisions=made, notes=("[/] and [red]",), shortages=shortages)
    console = Console(width=200, file=io.StringIO())
    print_plan(plan, console)
    printed = console.file.getvalue()
    for text in ("a[bold]b: MiB", "stays: [optim]", "note: [/] and [red]", "=[params]"):
        assert text in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--gpu", "h1000"], "--gpu h1000: must be one of h100-80gb"),
        (["tiny", "--gpu", "h100-80gb:0"], "--gpu h100-80gb:0"),
        (["tiny", "--gpu", "h100-80gb:12"], "give a multiple of 8"),
        ([*EIGHT, f"{TP}=2", "--gpu", "h100-80gb:1"], f"--gpu :1: {TP}=2: does not divide"),
        ([*EIGHT, f"{TP}=8"], f"choose a size that divides 28; set {TP}=1"),
        ([*PAIR, f"model.config={json.dumps(ONE_KEY_HEAD)}"], "in_proj_qkvz.weight: dimension 0"),
        (["tiny", "--into", "/nowhere"], "--into /nowhere: holds no run"),
        (["tiny", "--prompt-tokens", "0"], "--prompt-tokens 0: must be at least 1"),
        ([], "plan: names no recipe"),
    ],
)
def test_wrong_command_is_refused_in_one_line(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["plan", *words]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1
