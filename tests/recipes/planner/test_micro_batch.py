"""Micro batches that the plan chooses: sizes to try, the largest that fits, and a run with it."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import recipes
from recipes.config.decisions import Decisions
from recipes.planner.command import plan_of
from recipes.planner.dry_run import PlannedTrainer
from recipes.planner.memory_plan import MemoryPlan, PlanRequest
from recipes.planner.micro_batch import choose_size, reason, sizes_to_try
from recipes.planner.remedies import plan_with_remedies
from recipes.planner.sizes import GIB, MIB, Gpu, of_device
from recipes.planner.stage_plan import StagePlan
from recipes.run import continue_run, start_run
from recipes.setup.model_decisions import UNPLANNED
from recipes.setup.preparation import Setup
from trainer_bridge.trainer import Trainer

AUTO = ["trainer.micro_batch_size=auto", "cycle.resident=auto", "cycle.alias=never"]
WIDE = ["model.config.hidden_size=512", "model.config.intermediate_size=2048"]
WIDE += ["model.config.vocab_size=200", "sampling.max_tokens=50"]
FEW = ["prompts_per_step=8", "samples_per_prompt=4"]
GRPO = [*AUTO, *WIDE, *(f"grpo.{word}" for word in FEW)]
LIMIT = 2660 * MIB  # of which 2,184 MiB are contexts, and 8 of 32 sequences fit in the rest
PPO = [*AUTO, *WIDE, *(f"ppo.{word}" for word in FEW)]
MORE = pytest.mark.extended  # test_dry_run has the memory of these keys


def made_up(size: int, slope: int, generating: int, total: int) -> MemoryPlan:
    """Build a plan whose update takes 10 GiB and `slope` GiB for every sequence."""
    stages = [
        StagePlan(
            stage=name,
            used=used * GIB,
            processes={},
            torch={},
            tags={},
            contexts=0,
            host=0,
        )
        for name, used in (("generate_sequences", generating), ("update_actor", 10 + slope * size))
    ]
    gpu = Gpu("any", total * GIB, 0, 0, GIB, measured=False)
    facts: Any = {"host_bytes": 0, "kv_tokens": 0, "most_kv_tokens": 0, "notes": ()}
    facts |= {"gpu": gpu, "devices": 1, "stages": tuple(stages)}
    return MemoryPlan(name="any", decisions=Decisions(), **facts)


@given(st.integers(1, 3000), st.integers(1, 1 << 27))
def test_size_is_the_smallest_with_its_number_of_micro_batches(answers: int, elements: int) -> None:
    sizes = sizes_to_try(answers, elements)
    assert sizes == sorted({*sizes}) and sizes[0] == 1 and len(sizes) <= 13
    for size in sizes:
        assert size <= answers and (size == 1 or size * elements <= 1 << 26)
        assert size == 1 or math.ceil(answers / (size - 1)) > math.ceil(answers / size)
    assert (sizes[-1] == answers) == (answers * elements <= 1 << 26 or answers == 1)


@pytest.mark.parametrize(("width", "size"), [(896, 64), (1536, 32), (3584, 16)])
def test_largest_size_for_sequences_of_1k_tokens_is_the_one_that_gained(
    width: int, size: int
) -> None:
    assert sizes_to_try(1024, 1024 * width)[-1] == size


@given(st.integers(1, 500), st.integers(0, 5), st.integers(1, 200), st.integers(2, 400))
def test_largest_size_that_fits_is_chosen_and_more_memory_never_means_a_smaller_one(
    answers: int, slope: int, generating: int, total: int
) -> None:
    """A stage of generation may be too full; it says nothing about the micro batch."""
    sizes = sizes_to_try(answers, 1 << 20)
    make = partial(made_up, slope=slope, generating=generating)
    chosen, roomier = (choose_size(sizes, partial(make, total=gib)) for gib in (total, total + 7))

    def fits(size: int) -> bool:
        plan = make(size, total=total)
        return plan.stages[1].device_bytes <= plan.sure_room

    fitting = [size for size in sizes if fits(size)] if slope else sizes
    assert chosen == max(fitting, default=1) <= roomier <= answers


def test_few_plans_are_made() -> None:
    """Plan the largest size alone if it fits, else the smallest and one on the line between."""
    planned = list[int]()

    def make(size: int, total: int) -> MemoryPlan:
        planned.append(size)
        return made_up(size, slope=1, generating=0, total=total)

    for gib, sizes in ((500, [256]), (100, [256, 1, 64])):
        planned.clear()
        chosen = choose_size(sizes_to_try(256, 1 << 10), partial(make, total=gib))
        assert chosen == sizes[-1] and planned == sizes


def test_line_says_why_the_size_is_not_larger() -> None:
    assert reason(1, [1, 2, 4], 4) == "micro batch: 1 sequence; 2 do not fit"
    assert reason(4, [1, 2, 4], 4) == "micro batch: 4 sequences, all of an update on a rank"
    assert reason(4, [1, 2, 4], 64) == "micro batch: 4 sequences; larger ones save no time"


def planned(name: str, words: list[str], total: int) -> tuple[MemoryPlan, Decisions]:
    return planned_once(name, tuple(words), total)


@cache
def planned_once(name: str, words: tuple[str, ...], total: int) -> tuple[MemoryPlan, Decisions]:
    plan = plan_of(recipes.load(name, words), name, gpu=str(total))
    return plan, plan.decisions


@pytest.mark.parametrize(
    ("name", "words", "mib"),
    [
        pytest.param("tiny", GRPO, LIMIT // MIB, id="grpo"),
        pytest.param("tiny", [*GRPO, "trainer.keep_unsharded=true"], 2660, id="kept", marks=MORE),
        pytest.param("tiny", [*GRPO, "lora.rank=8"], 2588, id="adapters", marks=MORE),
        pytest.param(
            "tiny", [*GRPO, "driver=ray", "cluster.n_gpus_per_node=2"], 3570, id="two ranks"
        ),
        pytest.param("tiny-ppo", [*PPO, "loop.mini_batches=2"], 2764, id="ppo", marks=MORE),
    ],
)
def test_chosen_size_fits_and_the_next_does_not(name: str, words: list[str], mib: int) -> None:
    recipe = recipes.load(name, words)
    plan, made = planned(name, words, mib * MIB)
    size = made.micro_batch_size
    assert 1 < size < recipe.answers_per_update <= recipe.answers_per_rank
    assert plan.fits
    assert made.lines[-1] == f"micro batch: {size} sequences; {2 * size} do not fit"
    more, _ = planned(name, [*words, f"trainer.micro_batch_size={2 * size}"], mib * MIB)
    assert more.peak.device_bytes > plan.sure_room


def test_plan_with_the_chosen_size_in_the_recipe_is_the_same() -> None:
    plan, made = planned("tiny", GRPO, LIMIT)
    same, named = planned("tiny", [*GRPO, "trainer.micro_batch_size=8"], LIMIT)
    assert same.stages == plan.stages and named.lines == made.lines[:-1]


def test_passes_become_larger_than_kernels_need_only_if_that_saves_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let four sequences of 50 tokens fill a GPU; with kept parameters nothing is gathered again.

    On 3 GiB all answers fit, and nothing leaves for them. Masters are in fp32: parameters in
    forward's dtype are gathered by no pass.
    """
    monkeypatch.setattr("recipes.planner.micro_batch.ENOUGH", 4 * 59 * 512)
    kept, gathered = (
        planned("tiny", [*GRPO, "model.dtype=bfloat16", *words], 3 * GIB)[1]
        for words in ([], ["trainer.keep_unsharded=false"])
    )
    assert kept.keep_unsharded and kept.micro_batch_size == 4
    assert kept.lines[-1] == "micro batch: 4 sequences; larger ones save no time"
    assert gathered.micro_batch_size == 32


def test_gpu_without_room_for_one_sequence_gets_sensible_remedies() -> None:
    plan, made = planned("tiny", AUTO, 2300 * MIB)
    assert made.micro_batch_size == 1 and "short of" in plan.needs[0]
    assert "micro_batch_size" not in plan.needs[0]


def test_auto_is_4_beside_a_hosted_engine() -> None:
    words = [*GRPO, "device=auto", "engine.kind=vllm", "engine.kv_tokens=2048"]
    made = planned("tiny", words, 80 * GIB)[1]
    assert made.micro_batch_size == 4 and made.lines[-1] == UNPLANNED["micro_batch_size"]


def test_run_takes_the_planned_size_stays_in_the_limit_and_resumes_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_pictures: None,
) -> None:
    """Plan CPU runs for a GPU's limit; that of the resumed one would choose 1, and keep nothing.

    The micro batch is kept, recomputation is decided again, which changes no bits. The plans are
    made in this process, which takes less time than another process.
    """
    updates, update = list[tuple[int, str, bool, int]](), Trainer.update_actor

    def watched(self: Trainer, batch: Any) -> dict[str, float]:
        if isinstance(self, PlannedTrainer):
            return update(self, batch)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            figures = update(self, batch)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            held += event.nbytes() if event.name() == "[memory]" else 0
            peak = max(peak, held)
        used = peak + sum(self.take_usage().tags.values())
        size, way = self.config.micro_batch_size, self.config.activation_checkpointing
        updates.append((size, way, self.config.keep_unsharded, used))
        assert self.config.micro_batch_tokens == size * longest.pop()
        return figures

    monkeypatch.setattr(Trainer, "update_actor", watched)
    limits, plans, longest = iter([LIMIT, 2600 * MIB]), list[MemoryPlan](), list[int]()

    def plan_here(setup: Setup, total: int, outside: None) -> MemoryPlan:
        where: Any = {"directory": setup.model_dir, "prompt_tokens": setup.longest_prompt}
        request = PlanRequest(name="run", gpu=of_device(total), **where)
        longest.append(setup.max_request_tokens)
        plans.append(plan_with_remedies(setup.recipe, setup.decisions, request))
        return plans[-1]

    monkeypatch.setattr("recipes.run.device_bytes", lambda device: next(limits))
    monkeypatch.setattr("recipes.planner.decide.plan_apart", plan_here)
    words = [*GRPO, "eval.every=0", "checkpoint.every=1", "checkpoint.export_every=null"]
    words += ["trainer.activation_checkpointing=auto", "trainer.cuda_graphs=false"]
    start_run("tiny", [*words, "steps=1"], tmp_path / "run")
    assert "micro batch: 16 sequences; 32 do not fit" in capsys.readouterr().out
    continue_run(tmp_path / "run", None, ["steps=2"])
    assert "micro batch: 16 sequences; 32 do not fit" in capsys.readouterr().out
    assert [decided for *decided, _ in updates] == [[16, "mlp", False], [16, "layers", False]]
    assert [plan.gpu.total for plan in plans] == [LIMIT, 2600 * MIB]
    assert all(nbytes + plans[0].gpu.contexts <= LIMIT for *_, nbytes in updates)
