"""Decisions of the switch: the cheapest choice that fits, its reasons, and its plan for a run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import recipes
from recipes.config.load import recipe_text
from recipes.config.sections import CycleSection
from recipes.logs.run_folder import RunFolder
from recipes.planner.command import plan_apart, plan_of
from recipes.planner.memory_plan import MemoryPlan, Switch
from recipes.planner.micro_batch import UNPLANNED
from recipes.planner.sizes import GIB, Gpu
from recipes.planner.stage_plan import StagePlan
from recipes.planner.switch_plan import decide, describe
from recipes.run import decide_switch
from recipes.setup.model_files import meta_model
from recipes.setup.pool import pool_grows, rank_kv_layout
from recipes.setup.preparation import prepare, with_alias_decided

SAVED, DROPPED = ("params", "optim"), ("weights", "kv_cache")
ALONE = {"generate": DROPPED, "sync": ("params", "adapters", "weights")}
ALONE["train"] = (*SAVED, "adapters")
RECIPE = recipes.load("tiny", ["cycle.resident=auto"])
# 1.2 GiB of parameters and 2.4 GiB of moments in two layers.
FEW = [
    "tiny",
    "device=auto",
    "cycle.resident=auto",
    "cycle.alias=auto",
    "trainer.micro_batch_size=1",
    "trainer.keep_unsharded=false",
]
FEW += ["model.config.hidden_size=2048", "model.config.vocab_size=150000", "engine.kv_tokens=256"]


def made_up(sizes: dict[str, int], cache: int, total: int) -> MemoryPlan:
    """Build a plan without resident tags from sizes in GiB; only training fills torch's cache."""
    stages = []
    for stage, tags in ALONE.items():
        held = {tag: sizes[tag] * GIB if tag in tags else 0 for tag in sizes}
        torch = {"trainer": cache * GIB if stage == "train" else 0}
        processes = {"trainer": sum(held.values()) + torch["trainer"]}
        rest: Any = {
            "processes": processes,
            "used": processes["trainer"],
            "torch": torch,
            "tags": held,
            "contexts": 0,
            "host": 0,
        }
        stages.append(StagePlan(stage=stage, **rest))
    gpu = Gpu("any", total * GIB, 0, 0, GIB, measured=False)
    facts: Any = {"host_bytes": 0, "kv_tokens": 0, "most_kv_tokens": 0, "notes": ()}
    return MemoryPlan(name="any", gpu=gpu, devices=1, stages=tuple(stages), **facts)


def decided(plan: MemoryPlan) -> Switch:
    return describe(plan, RECIPE, decide(plan, RECIPE))


@given(
    st.fixed_dictionaries(dict.fromkeys((*SAVED, *DROPPED), st.integers(1, 12))),
    st.integers(0, 8),
    st.integers(4, 60),
)
def test_decide_keeps_the_tags_of_the_cheapest_switch_that_fits(
    sizes: dict[str, int], cache: int, total: int
) -> None:
    """Use a link on which a copied GiB costs two seconds and all mapping less than one."""
    chosen = decide(made_up(sizes, cache, total), RECIPE)
    room = total - 0.25 - 0.03 * total

    def fits(resident: tuple[str, ...]) -> bool:
        whole = len(resident) == len(sizes)
        peaks = [
            sum(sizes.get(tag, 0) for tag in {*tags, *resident})
            + (cache if whole or stage == "train" else 0)
            for stage, tags in ALONE.items()
        ]
        return max(peaks) <= room

    def saved(resident: tuple[str, ...]) -> int:
        return sum(sizes[tag] for tag in SAVED if tag in resident)

    subsets = chain.from_iterable(combinations(sizes, count) for count in range(len(sizes) + 1))
    fitting = [resident for resident in subsets if fits(resident)]
    assert fits(chosen) if fitting else chosen == ()
    assert saved(chosen) == max(map(saved, fitting), default=0)


def test_adapters_move_with_the_parameters() -> None:
    sizes = {"params": 2, "adapters": 1, "optim": 1, "weights": 2, "kv_cache": 1}
    roomy = decided(made_up(sizes, cache=1, total=80))
    assert set(roomy.resident) == {*SAVED, *DROPPED} and roomy.lines[1] == "leaves: nothing"
    # torch's cache stays if nothing leaves; with it, all tags would take 8 of 7.5 GiB.
    tight = decided(made_up(sizes, cache=1, total=8))
    assert tight.lines[0].startswith("stays: params 3.0") and set(SAVED) <= {*tight.resident}
    assert "leaves: " in tight.lines[1] and "adapters" not in tight.lines[1]


@pytest.mark.parametrize(("nbytes", "gain"), [(3.42, -0.019), (42.56, 0.167), (7.4, -1e-4)])
@pytest.mark.parametrize("wish", ["auto", "always"])
def test_hand_over_gains_the_measured_time_and_auto_uses_it_if_positive(
    nbytes: float, gain: float, wish: str
) -> None:
    """Use both measured sizes, and one just below the size from which on it gains."""
    sizes = dict.fromkeys((*SAVED, *DROPPED), 50)
    plan, handed = made_up(sizes, cache=1, total=80), int(nbytes * GIB)
    recipe = replace(RECIPE, cycle=CycleSection(resident=[], hand_over=wish))
    driver = describe(plan, recipe, [])
    assert not driver.hand_over and "driver" not in " ".join(driver.lines)
    switch = describe(plan, recipe, [], handed_over=handed)
    assert switch.hand_over == (gain > 0 or wish == "always")
    expected = gain if switch.hand_over else 0
    assert driver.seconds - switch.seconds == pytest.approx(expected, abs=1e-4)
    change = f"{1000 * abs(gain):.0f} ms {'less' if gain > 0 else 'more'}"
    assert (
        change in switch.lines[2] and ("gains above 7.4 GiB" in switch.lines[2]) != switch.hand_over
    )


def test_hand_over_gains_at_most_the_time_of_the_driver() -> None:
    plan = made_up(dict.fromkeys((*SAVED, *DROPPED), 5), cache=0, total=80)
    recipe = replace(RECIPE, cycle=CycleSection(resident=[]))
    gained = [describe(plan, recipe, [], handed_over=n * GIB).seconds for n in (0, 15, 1000)]
    assert gained[0] - gained[1] == gained[0] - gained[2] == pytest.approx(20 * 1.6e-3)


def test_plan_hands_over_as_the_cycle_does_and_gives_its_reason() -> None:
    """Hand moments to the weights, parameters to the pool, and the engine's memory to parameters.

    Each hand-over is limited by the smaller side. The key `cycle.hand_over` overrides.
    """
    words = [*FEW[1:], "cycle.resident=[]", "cycle.overlap=[]", "cycle.alias=never"]

    def planned(*more: str) -> MemoryPlan:
        return plan_of(recipes.load("tiny", [*words, *more]), "any", gpu="h100-80gb")

    plan = planned()
    most: Counter[str] = Counter()
    for stage in plan.stages:
        most |= Counter(stage.tags)
    engine = most["weights"] + most["kv_cache"] + most["cuda_graph"]
    into = min(most["optim"], most["weights"]), min(most["params"], most["kv_cache"])
    assert plan.handed_over == sum(into) + min(engine, most["params"]) > 0
    assert plan.switch is not None and not plan.switch.hand_over
    assert plan.switch.lines[2].startswith("through the driver: handing ")
    always, never = planned("cycle.hand_over=always"), planned("cycle.hand_over=never")
    assert always.switch is not None and always.switch.hand_over and never.handed_over == 0
    assert always.switch.lines[2].startswith("handed over: ")
    assert never.switch is not None and len(never.switch.lines) == 3


def test_optimizer_on_the_host_is_planned_in_host_memory() -> None:
    """Expect 12 bytes per parameter at all times, and 2 more while parameters are offloaded."""
    words = ["cycle.resident=[]", "cycle.alias=never", "model.dtype=bfloat16", "cluster.host_gib=8"]
    recipe = recipes.load(FEW[0], [*FEW[1:], *words, "trainer.optimizer_offload=true"])
    plan = plan_of(recipe, "host", gpu="h100-80gb")
    params = max(stage.tags["params"] for stage in plan.stages)
    assert all("optim" not in stage.tags for stage in plan.stages)
    for stage in plan.stages:
        away = 0 if stage.tags["params"] else params
        assert stage.host == pytest.approx(6 * params + away, rel=0.01)  # whole pages and alignment
    assert plan.host_bytes == pytest.approx(7 * params + 4 * GIB, rel=0.01)
    assert len(plan.needs) == 1 and "the host is short of" in plan.needs[0]
    assert "set cycle.resident=[params]" in plan.needs[0]


def test_switch_lines_name_resident_and_leaving_tags_with_reasons() -> None:
    recipe = recipes.load(FEW[0], [*FEW[1:], "cycle.alias=never"])
    roomy = plan_of(recipe, "roomy", gpu="h100-80gb").switch
    tight = plan_of(recipe, "tight", gpu=str(13 * GIB))
    assert roomy is not None and tight.switch is not None and tight.fits
    assert set(roomy.resident) == {"params", "optim", "weights", "kv_cache", "cuda_graph"}
    assert roomy.lines[1] == "leaves: nothing" and "own pages" not in roomy.lines[0]
    assert not {"params", "optim"} <= {*tight.switch.resident}
    assert "if all tags stayed, update_actor would take" in tight.switch.lines[1]
    assert tight.switch.seconds > 5 * roomy.seconds > 0
    assert tight.as_json()["switch"]["resident"] == tight.switch.resident


@pytest.mark.parametrize(
    ("more", "alias"),
    [([], "always"), (["lora.rank=4"], "never"), (["trainer.dtype=bfloat16"], "never")],
    ids=["alike", "adapters", "another dtype"],
)
def test_alias_on_one_device_needs_pages_of_the_models_dtype(
    more: list[str], alias: str, tmp_path: Path
) -> None:
    assert prepare(recipes.load("tiny", ["cycle.alias=auto", *more]), tmp_path).recipe.cycle == (
        CycleSection(resident=[], alias=alias)
    )
    if alias == "never":
        with pytest.raises(
            recipes.RecipeError, match=r"cycle.alias=always: .* set cycle.alias=auto"
        ):
            prepare(recipes.load("tiny", ["cycle.alias=always", *more]), tmp_path)


def test_plan_apart_returns_switch_and_shortages_in_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan in a working directory with another package `recipes`."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    long = ["sampling.max_tokens=20", "engine.kv_tokens=16"]
    recipe = recipes.load(FEW[0], [*FEW[1:], *long])
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    recipe = replace(recipe, cycle=replace(recipe.cycle, alias="always"))
    recipe = replace(recipe, trainer=replace(recipe.trainer, micro_batch_size=2))  # resumed
    decided = plan_apart(tmp_path, 80 * GIB, recipe, 9)
    assert decided.micro_batch_size == 2
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["switch"]["resident"] == decided.resident and "optim" in decided.resident
    assert "weights are the trainer's own pages" in decided.lines[0] and not decided.hand_over
    assert not written["fits"] and "too small for one request of" in written["needs"][0]
    assert decided.lines[-1] == f"does not fit: {written['needs'][0]}"


def test_run_without_a_plan_follows_its_keys_and_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    reasons = {"/bin/false": "exit status 1", str(hangs): "it took more than 0.1 s"}
    for python, why in reasons.items():
        monkeypatch.setattr("sys.executable", python)
        for words in ([], ["cycle.resident=[params]", "cycle.overlap=[optim]"]):
            recipe = recipes.load(FEW[0], [*FEW[1:], *words])
            patience = 0.1 if python == str(hangs) else 60.0
            decided = plan_apart(tmp_path, 80 * GIB, recipe, 9, patience)
            assert decided.resident == recipe.cycle.named and not decided.hand_over
            assert decided.overlap == (["optim"] if words else [])
            assert decided.lines[0].endswith(f"there is no plan: {why}")


def test_run_with_hosted_engine_is_planned_with_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan with two measurements, of which the larger leaves no room for the moments."""
    recipe = recipes.load(FEW[0], [*FEW[1:], "engine.kind=vllm"])
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    gpu = SimpleNamespace(total_memory=20 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    setup: Any = SimpleNamespace(
        recipe=with_alias_decided(recipe, tmp_path), device="cuda:0", longest_prompt=9
    )
    resident = []
    for outside in (2 * GIB, 12 * GIB):
        monitor: Any = SimpleNamespace(outside=lambda measured=outside: measured)
        decided = decide_switch(setup, RunFolder(tmp_path), monitor)
        written = json.loads((tmp_path / "plan.json").read_text())
        assert written["outside"]["measured"] == outside and decided.overlap == []
        assert {stage["used_bytes"] > outside for stage in written["stages"]} == {True}
        resident.append(decided.resident)
        assert decided.lines[0].startswith("stays: ")
    assert resident[0] == ["params", "optim", "weights", "kv_cache", "cuda_graph"]
    assert "optim" not in resident[1]
    named = {"resident": ["params"], "hand_over": "always"}
    setup.recipe = replace(recipe, cycle=replace(recipe.cycle, **named))
    decided = decide_switch(setup, RunFolder(tmp_path), monitor)
    assert (decided.resident, decided.overlap, decided.hand_over) == (["params"], [], True)


@pytest.mark.parametrize(
    ("words", "planned"),
    [
        ("", True),
        ("cycle.resident=[optim] cycle.overlap=[]", True),
        ("cycle.resident=[optim] cycle.overlap=[] cycle.hand_over=never", False),
        ("cycle.resident=[optim] cycle.overlap=[params]", False),
        ("cycle.resident=[optim] cycle.overlap=[params] trainer.micro_batch_size=8", True),
        (
            "cycle.resident=[optim] cycle.overlap=[params] trainer.micro_batch_size=8 "
            "trainer.keep_unsharded=false",
            False,
        ),
        ("cycle.resident=[optim] cycle.hand_over=never", True),
        ("cycle.resident=[optim] cycle.overlap=[params] trainer.micro_batch_size=auto", True),
        ("engine.kind=vllm cycle.resident=[optim] cycle.hand_over=never", False),
        (
            "engine.kind=vllm cycle.resident=[optim] cycle.hand_over=never "
            "trainer.micro_batch_size=auto",
            False,
        ),
        ("engine.kind=vllm cycle.resident=[optim]", True),
    ],
)
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_run_is_planned_only_if_a_key_of_its_switch_is_auto(
    words: str, planned: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.load("tiny", ["device=auto", "cycle.resident=auto", *words.split()])
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    switch = object()
    monkeypatch.setattr("recipes.run.plan_apart", lambda *_: switch)
    setup: Any = SimpleNamespace(recipe=recipe, device=device, longest_prompt=9)
    monitor: Any = None
    decided = decide_switch(setup, RunFolder(tmp_path), monitor)
    if device == "cuda:0" and planned:
        assert decided is switch
    else:
        assert decided.resident == (recipe.resident_tags() if not words else ["optim"])
        assert not decided.hand_over
        auto = recipe.trainer.micro_batch_size == "auto"
        assert decided.micro_batch_size == (4 if auto else recipe.trainer.micro_batch_size)
        assert (UNPLANNED in decided.lines) == auto


@pytest.mark.parametrize(
    ("gib", "words", "keeps"),
    [
        (15, [], True),
        (15, ["grpo.prompts_per_step=1", "grpo.samples_per_prompt=2"], False),
        (14, [], False),
    ],
)
def test_unsharded_parameters_are_kept_if_they_fit_and_save_more_than_they_cost(
    gib: int, words: list[str], keeps: bool
) -> None:
    """Beside them on 15 GiB, the engine's weights leave; on 14 GiB they never fit."""
    words = [*FEW[1:], "cycle.alias=never", "trainer.keep_unsharded=auto", *words]
    switch = plan_of(recipes.load("tiny", words), "any", gpu=str(gib * GIB)).switch
    assert switch is not None and switch.keep_unsharded == keeps
    assert keeps == any(line.startswith("kept from micro batch") for line in switch.lines)
    assert ("weights" in switch.resident) == (gib == 15 and not keeps)


def test_leaving_tags_are_overlapped_if_they_fit_with_the_weights() -> None:
    """Plan with 8 GiB of KV cache that leave; the copies of the moments are hidden completely."""
    words = [*FEW[1:], "cycle.alias=never", "engine.kv_tokens=16000000", "cycle.resident=[params]"]
    words += ["cycle.overlap=auto"]

    def planned(*more: str) -> tuple[MemoryPlan, Switch]:
        plan = plan_of(recipes.load("tiny", [*words, *more]), "any", gpu=str(14 * GIB))
        assert plan.switch is not None
        return plan, plan.switch

    (plan, overlapped), (_, serial) = planned(), planned("cycle.overlap=[]")
    assert overlapped.resident == serial.resident and (overlapped.overlap, serial.overlap) == (
        ("optim",),
        (),
    )
    assert overlapped.lines[2] == (
        "overlapped: optim leave during generation; back during scoring: optim"
    )
    moments = max(stage.tags["optim"] for stage in plan.stages)
    assert serial.seconds - overlapped.seconds == pytest.approx(2 * moments / plan.gpu.link)


def test_named_overlap_is_planned_even_if_it_does_not_fit() -> None:
    words = ["cycle.overlap=[params,optim]", "cycle.resident=[]", "cycle.alias=never"]
    plan = plan_of(recipes.load("tiny", words), "short", gpu=str(2 * GIB))
    assert plan.switch is not None and plan.switch.overlap == ("params", "optim")
    assert "begin_offload" in {stage.stage for stage in plan.stages}
    assert any("is short of" in need for need in plan.needs)


@pytest.mark.parametrize(
    ("more", "grows"),
    [
        ("", True),
        ("engine.host_to_device_ratio=0.5", False),
        ("driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2", False),
    ],
)
def test_pool_grows_only_without_tiers_and_tensor_parallelism(more: str, grows: bool) -> None:
    recipe = recipes.load("tiny", more.split())
    config = meta_model(recipe.model.random_fields()).config
    assert pool_grows(recipe, rank_kv_layout(recipe, config, torch.float32)) == grows
