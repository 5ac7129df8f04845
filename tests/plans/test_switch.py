"""Decisions of the switch: the cheapest choice that fits, its reasons, and its plan for a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
import recipes
from recipes.config.decisions import Decisions
from recipes.config.sections import CycleSection
from recipes.planner.command import plan_of
from recipes.planner.decide import decide
from recipes.planner.memory_plan import MemoryPlan
from recipes.planner.sizes import GIB, Gpu
from recipes.planner.stage_plan import StagePlan
from recipes.planner.switch_plan import Switch
from recipes.setup.model_decisions import ALIASED, UNPLANNED, first_decisions
from recipes.setup.model_files import describe_random_model, meta_model, toy_tokenizer
from recipes.setup.pool import pool_grows
from recipes.setup.preparation import Setup, prepare
from tests.helpers.docs.pages import ROOT

LORA_32B = ROOT / "examples" / "plans" / "qwen2.5-32b-lora.yaml"
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
    facts |= {"gpu": gpu, "devices": 1, "stages": tuple(stages)}
    return MemoryPlan(name="any", decisions=Decisions.named(RECIPE), **facts)


def decided(plan: MemoryPlan) -> Decisions:
    switch = Switch(plan, RECIPE)
    return switch.described(plan, plan.decisions, switch.cheapest()).decisions


@given(
    st.fixed_dictionaries(dict.fromkeys((*SAVED, *DROPPED), st.integers(1, 12))),
    st.integers(0, 8),
    st.integers(4, 60),
)
def test_cheapest_keeps_the_tags_of_the_cheapest_switch_that_fits(
    sizes: dict[str, int], cache: int, total: int
) -> None:
    """Use a link on which a copied GiB costs two seconds and all mapping less than one."""
    chosen = Switch(made_up(sizes, cache, total), RECIPE).cheapest()
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


@pytest.mark.parametrize(("nbytes", "gain"), [(3.42, -0.019), (42.56, 0.167), (6.9, -1e-4)])
@pytest.mark.parametrize("wish", ["auto", "always"])
def test_hand_over_gains_the_measured_time_and_auto_uses_it_if_positive(
    nbytes: float, gain: float, wish: str
) -> None:
    """Use both measured sizes, to 30 ms, and one just below the size from which on it gains."""
    sizes = dict.fromkeys((*SAVED, *DROPPED), 50)
    plan, handed = made_up(sizes, cache=1, total=80), int(nbytes * GIB)
    recipe = replace(RECIPE, cycle=CycleSection(resident=[], hand_over=wish))
    switch, made = Switch(plan, recipe), Decisions.named(recipe)
    driver = switch.described(plan, made, [])
    assert not driver.decisions.hand_over and "driver" not in " ".join(driver.decisions.lines)
    handing = switch.described(replace(plan, handed_over=handed), made, [])
    assert handing.decisions.hand_over == (gain > 0 or wish == "always")
    expected = gain if handing.decisions.hand_over else 0
    assert driver.exposed - handing.exposed == pytest.approx(expected, abs=0.03)
    line = handing.decisions.reasons["hand_over"]
    change = "more" if gain < 0 else f"{1000 * (driver.exposed - handing.exposed):.0f} ms less"
    assert change in line and ("gains above 6.9 GiB" in line) != handing.decisions.hand_over


@pytest.mark.parametrize(("tokens", "whole"), [(4000, True), (12000, False)])
def test_several_gpus_have_the_whole_base_of_adapters_if_it_fits(tokens: int, whole: bool) -> None:
    words = [
        *("cluster.n_gpus_per_node=8", "cycle.resident=[]", "cycle.overlap=[]"),
        *("trainer.micro_batch_size=1", "trainer.activation_checkpointing=layers"),
        *("trainer.cuda_graphs=false", "trainer.keep_unsharded=false", "engine.max_running=1"),
    ]
    recipe = recipes.load(LORA_32B, [*words, f"sampling.max_tokens={tokens}"])
    plan = plan_of(recipe, "32b", gpu=None)
    assert plan.fits and plan.decisions.alias == whole
    off = "alias: off, because whole weights do not fit each device"
    assert plan.decisions.reasons["alias"] == (ALIASED if whole else off)


def test_hand_over_gains_at_most_the_time_of_the_driver() -> None:
    plan = made_up(dict.fromkeys((*SAVED, *DROPPED), 5), cache=0, total=80)
    recipe = replace(RECIPE, cycle=CycleSection(resident=[]))
    plans = [replace(plan, handed_over=count * GIB) for count in (0, 15, 1000)]
    switch, made = Switch(plan, recipe), Decisions.named(recipe)
    gained = [switch.described(each, made, []).exposed for each in plans]
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
    assert not plan.decisions.hand_over
    assert plan.decisions.reasons["hand_over"].startswith("through the driver: handing ")
    always, never = planned("cycle.hand_over=always"), planned("cycle.hand_over=never")
    assert always.decisions.hand_over and never.handed_over == 0
    assert always.decisions.reasons["hand_over"].startswith("handed over: ")
    assert not never.decisions.hand_over and "hand_over" not in never.decisions.reasons


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
    plans = [plan_of(recipe, "any", gpu=gpu) for gpu in ("h100-80gb", str(21 * GIB // 2))]
    roomy, tight = (plan.decisions for plan in plans)
    assert plans[1].fits and plans[1].exposed > 5 * plans[0].exposed > 0
    assert set(roomy.resident) == {"params", "optim", "weights", "kv_cache", "cuda_graph"}
    assert roomy.lines[2] == "leaves: nothing" and not roomy.alias
    assert not {"params", "optim"} <= {*tight.resident}
    assert "if all tags stayed, update_actor would take" in tight.lines[2]
    assert plans[1].as_json()["decisions"]["resident"] == tight.resident


@pytest.mark.parametrize(
    ("more", "alias"),
    [
        ([], True),
        (["lora.rank=4"], True),
        (["lora.rank=4", "lora.merge=true"], False),
        (["trainer.dtype=bfloat16"], False),
    ],
    ids=["alike", "adapters", "merged adapters", "another dtype"],
)
def test_alias_on_one_device_needs_pages_of_the_models_dtype(
    more: list[str], alias: bool, tmp_path: Path
) -> None:
    recipe = recipes.load("tiny", ["cycle.alias=auto", *more])
    assert prepare(recipe, tmp_path).decisions.alias == alias
    if not alias:
        with pytest.raises(
            recipes.RecipeError, match=r"cycle.alias=always: .* set cycle.alias=auto"
        ):
            prepare(recipes.load("tiny", ["cycle.alias=always", *more]), tmp_path)


def prepared(words: list[str], folder: Path, device: str = "cuda:0", **made: Any) -> Setup:
    """Return what `decide` needs of a prepared run, with further decisions of earlier steps."""
    recipe = recipes.load("tiny", words)
    describe_random_model(recipe.model.random_fields(), toy_tokenizer([]), folder)
    decisions = first_decisions(recipe, folder, None, Decisions.lasting(made))
    given = {"recipe": recipe, "decisions": decisions, "model_dir": folder, "device": device}
    setup: Any = SimpleNamespace(**given, longest_prompt=9)
    return setup  # type: ignore[no-any-return]


def test_decisions_of_a_plan_in_any_working_directory_are_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan beside another package `recipes` in the working directory, with a known micro batch."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    words = [*FEW[1:], "sampling.max_tokens=20", "engine.kv_tokens=16"]
    words.append("trainer.micro_batch_size=auto")
    setup = prepared(words, tmp_path, micro_batch_size=2)
    made, plan = decide(setup, 80 * GIB)
    assert plan is not None and not plan.fits and plan.decisions == made
    assert made.micro_batch_size == 2 and "optim" in made.resident and made.alias
    assert "alias: weights are the trainer's own pages" in made.lines and not made.hand_over
    assert "too small for one request of" in plan.needs[0]
    assert plan.unfit == [f"does not fit: {plan.needs[0]}"]
    words.append("trainer.micro_batch_size=2")
    same = plan_of(recipes.load("tiny", words), "any", gpu=str(80 * GIB), prompt_tokens=9)
    assert same.decisions == made and same.needs == plan.needs


def test_run_without_a_plan_follows_its_keys_and_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    reasons = {"/bin/false": "exit status 1", str(hangs): "it took more than 0.1 s"}
    for python, why in reasons.items():
        monkeypatch.setattr("sys.executable", python)
        if python == str(hangs):
            monkeypatch.setattr("recipes.planner.decide.PATIENCE", 0.1)
        for words in ([], ["cycle.resident=[params]", "cycle.overlap=[optim]"]):
            words = ["model.dtype=bfloat16", "trainer.keep_unsharded=auto", *words]
            setup = prepared([*FEW[1:], *words], tmp_path)
            made, _ = decide(setup, 80 * GIB)
            assert [*made.resident] == setup.recipe.cycle.named and not made.hand_over
            assert [*made.overlap] == (["optim"] if words[2:] else []) and not made.open
            assert made.reasons["resident"].endswith(f"there is no plan: {why}")


def test_run_with_hosted_engine_is_planned_with_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan with two measurements, of which the larger leaves no room for the moments."""
    here = "recipes.planner.decide.call_in_child"  # A child takes seconds for its imports.
    monkeypatch.setattr(here, lambda function, *given, **how: function(*given))
    words = [*FEW[1:], "engine.kind=vllm"]
    resident = []
    for outside in (2 * GIB, 12 * GIB):
        made, plan = decide(prepared(words, tmp_path), 20 * GIB, outside)
        assert plan is not None and plan.outside is not None
        assert plan.outside["measured"] == outside and not made.overlap
        assert {stage.device_bytes > outside for stage in plan.stages} == {True}
        resident.append([*made.resident])
        assert made.reasons["resident"].startswith("stays: ")
    assert resident[0] == ["params", "optim", "weights", "kv_cache", "cuda_graph"]
    assert "optim" not in resident[1]
    named = ["cycle.resident=[params]", "cycle.hand_over=always"]
    made, _ = decide(prepared([*words, *named], tmp_path), 20 * GIB, 2 * GIB)
    assert ([*made.resident], [*made.overlap], made.hand_over) == (["params"], [], True)


@pytest.mark.parametrize(
    ("words", "planned"),
    [
        ("", True),
        ("cycle.resident=[optim] cycle.overlap=[]", True),
        ("cycle.resident=[optim] cycle.overlap=[] cycle.hand_over=never", False),
        ("cycle.resident=[optim] cycle.overlap=[params]", False),
        ("cycle.resident=[optim] cycle.overlap=[params] trainer.micro_batch_size=8", False),
        (
            "cycle.resident=[optim] cycle.overlap=[params] trainer.micro_batch_size=8 "
            "model.dtype=bfloat16",
            True,
        ),
        (
            "cycle.resident=[optim] cycle.overlap=[params] trainer.micro_batch_size=8 "
            "model.dtype=bfloat16 trainer.keep_unsharded=false",
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
def test_run_is_planned_only_if_a_decision_is_open(
    words: str, planned: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = ["device=auto", "cycle.resident=auto", "trainer.cuda_graphs=false"]
    setup = prepared([*rest, *words.split()], tmp_path, device)
    plan = MemoryPlan(**{**vars(made_up({}, 0, 80)), "decisions": Decisions(alias=True)})
    monkeypatch.setattr("recipes.planner.decide.plan_apart", lambda *_: plan)
    made, _ = decide(setup, 80 * GIB if device == "cuda:0" else None)
    if device == "cuda:0" and planned:
        assert made is plan.decisions
        return
    assert [*made.resident] == (setup.recipe.present_tags() if not words else ["optim"])
    assert not made.hand_over and not made.open
    auto = setup.recipe.trainer.micro_batch_size == "auto"
    assert made.micro_batch_size == (4 if auto else setup.recipe.trainer.micro_batch_size)
    assert (UNPLANNED["micro_batch_size"] in made.lines) == auto


@pytest.mark.parametrize(
    ("gib", "words", "keeps"),
    [
        (15, [], True),
        (15, ["loop.prompts_per_step=1", "loop.samples_per_prompt=2"], False),
        (14, [], False),
    ],
)
def test_unsharded_parameters_are_kept_if_they_fit_and_save_more_than_they_cost(
    gib: int, words: list[str], keeps: bool
) -> None:
    """Beside them on 15 GiB, the engine's weights leave; on 14 GiB they never fit.

    There are two ranks, for one gathers nothing in forward's dtype.
    """
    words = [*FEW[1:], "cycle.alias=never", "trainer.keep_unsharded=auto", *words]
    words += ["driver=ray", "cluster.n_gpus_per_node=2"]
    made = plan_of(recipes.load("tiny", words), "any", gpu=str(gib * GIB)).decisions
    assert made.keep_unsharded == keeps
    assert keeps == any(line.startswith("kept from micro batch") for line in made.lines)
    assert ("weights" in made.resident) == (not keeps)


def test_leaving_tags_are_overlapped_if_they_fit_with_the_weights() -> None:
    """Plan with 8 GiB of KV cache that leave; the copies of the moments are hidden completely."""
    words = [*FEW[1:], "cycle.alias=never", "engine.kv_tokens=16000000", "cycle.resident=[params]"]
    words += ["cycle.overlap=auto"]

    def planned(*more: str) -> tuple[MemoryPlan, Decisions]:
        plan = plan_of(recipes.load("tiny", [*words, *more]), "any", gpu=str(14 * GIB))
        return plan, plan.decisions

    (plan, overlapped), (plain, serial) = planned(), planned("cycle.overlap=[]")
    assert overlapped.resident == serial.resident
    assert (overlapped.overlap, serial.overlap) == (("optim",), ())
    assert overlapped.reasons["overlap"] == (
        "overlapped: optim leave during generation; back during scoring: optim"
    )
    moments = max(stage.tags["optim"] for stage in plan.stages)
    assert plain.exposed - plan.exposed == pytest.approx(2 * moments / plan.gpu.link)


def test_named_overlap_is_planned_even_if_it_does_not_fit() -> None:
    words = ["cycle.overlap=[params,optim]", "cycle.resident=[]", "cycle.alias=never"]
    plan = plan_of(recipes.load("tiny", words), "short", gpu=str(2 * GIB))
    assert plan.decisions.overlap == ("params", "optim")
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
    assert pool_grows(recipe, kvcache.layout(config)) == grows
