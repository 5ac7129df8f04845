"""What a plan lets the backward pass recompute: the least time among what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes
from recipes.config.decisions import Decisions
from recipes.config.literals import Checkpointing
from recipes.planner.command import plan_of
from recipes.planner.memory_plan import MemoryPlan
from recipes.planner.recomputation import Work, with_graphs, with_recomputation
from recipes.planner.sizes import GIB, MIB, Gpu
from recipes.planner.stage_plan import StagePlan

WORDS: dict[Checkpointing, str] = {"none": "nothing", "mlp": "MLPs", "layers": "layers"}
WAYS = tuple(WORDS)
WIDE = [
    *("trainer.micro_batch_size=auto", "cycle.resident=auto", "cycle.alias=never"),
    *("model.config.hidden_size=512", "model.config.intermediate_size=2048"),
    *("model.config.vocab_size=200", "sampling.max_tokens=50"),
    *("loop.prompts_per_step=8", "loop.samples_per_prompt=4", "trainer.cuda_graphs=false"),
]


def made_up(way: Checkpointing, size: int, update: int) -> MemoryPlan:
    """Build a plan for a GPU of 100 GiB whose update takes `update` GiB."""
    stage = StagePlan(
        stage="update_actor", used=update * GIB, processes={}, torch={}, tags={}, contexts=0, host=0
    )
    gpu = Gpu("any", 100 * GIB, 0, 0, GIB, measured=False)
    facts: Any = {"host_bytes": 0, "kv_tokens": 0, "most_kv_tokens": 0, "notes": (), "devices": 1}
    made = Decisions(activation_checkpointing=way, micro_batch_size=size)
    return MemoryPlan(name="any", decisions=made, gpu=gpu, stages=(stage,), **facts)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 120)), min_size=3, max_size=3),
    st.lists(st.floats(0, 2), min_size=3, max_size=3),
    st.builds(Work, st.floats(1e12, 1e16), st.just(2), st.just(64), st.integers(1, 60)),
)
def test_fastest_way_that_fits_is_chosen_and_layers_if_none_does(
    plans: list[tuple[int, int]], exposed: list[float], work: Work
) -> None:
    made = {way: made_up(way, *plan) for way, plan in zip(WAYS, plans, strict=True)}
    other, planned = dict(zip(WAYS, exposed, strict=True)), list[Checkpointing]()

    def plan(way: Checkpointing, line: Mapping[str, str]) -> MemoryPlan:
        planned.append(way)
        return made[way]

    def seconds(plan: MemoryPlan) -> float:
        return other[plan.decisions.activation_checkpointing]

    chosen = with_recomputation(plan, seconds, work).decisions.activation_checkpointing
    took = {
        way: seconds(plan) + work.seconds(plan.decisions)
        for way, plan in made.items()
        if plan.peak.device_bytes <= plan.sure_room
    }
    assert chosen == (min(took, key=lambda way: took[way]) if took else "layers")
    assert planned == list(WAYS[: len(planned)]), "none is planned first, and some not at all"


def test_a_pass_costs_what_the_slower_of_device_and_host_takes() -> None:
    large, small = Work(4e15, 1, 64, 28), Work(4e12, 1, 64, 28)

    def made(size: int, way: Checkpointing = "none", graphs: bool = False) -> Decisions:
        return Decisions(activation_checkpointing=way, micro_batch_size=size, cuda_graphs=graphs)

    times = [large.seconds(made(64, way)) for way in WAYS]
    assert times == sorted(times) and times[0] == large.seconds(made(16))
    assert small.seconds(made(8)) == pytest.approx(8 * small.seconds(made(64)))
    assert small.seconds(made(8, graphs=True)) == small.device_seconds("none")


def test_less_memory_means_more_recomputation_and_the_named_key_gives_the_same_plan() -> None:
    auto = [*WIDE, "trainer.activation_checkpointing=auto"]
    totals = (2900, 2720, 2600)
    plans = [plan_of(recipes.load("tiny", auto), "tiny", gpu=str(mib * MIB)) for mib in totals]
    assert [plan.decisions.activation_checkpointing for plan in plans] == [*WAYS]
    for plan, mib, way in zip(plans, totals, WAYS, strict=True):
        words = [*auto[:-1], f"trainer.activation_checkpointing={way}"]
        named = plan_of(recipes.load("tiny", words), "tiny", gpu=str(mib * MIB))
        assert named.stages == plan.stages and plan.fits
        line = f"recomputed in backward: {WORDS[way]}"
        assert plan.decisions.lines == [*named.decisions.lines[:-1], line, plan.decisions.lines[-1]]


def test_graphs_are_chosen_where_launches_take_longer_than_the_work_and_the_plan_has_room() -> None:
    words = [*WIDE, "trainer.activation_checkpointing=layers", "trainer.micro_batch_size=2"]
    plans = {
        graphs: plan_of(
            recipes.load("tiny", [*words, f"trainer.cuda_graphs={graphs}"]), "tiny", gpu="h100-80gb"
        )
        for graphs in ("auto", "true", "false")
    }
    assert plans["auto"].decisions.cuda_graphs and plans["auto"].stages == plans["true"].stages
    assert any(line.startswith("CUDA graphs of layers") for line in plans["auto"].decisions.lines)
    graphed, plain = (plans[name].peak.torch["trainer"] for name in ("true", "false"))
    assert 0.8 * plain < graphed < 1.2 * plain, "the same tensors, held for other times"
    work, asked = Work(4e15, 1, 64, 28, graphs=True), list[object]()

    def planned(line: object) -> MemoryPlan:
        asked.append(line)
        return short

    plain_plan, short = made_up("none", 64, 50), made_up("none", 64, 99)
    assert with_graphs(plain_plan, planned, work) is plain_plan and not asked
    assert with_graphs(plain_plan, planned, replace(work, operations=4e9)) is plain_plan and asked
