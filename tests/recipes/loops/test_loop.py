"""Loops that run without a folder and without a monitor: what they decide, and when they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.arguments import cycle_arguments
from recipes.config.load import load
from recipes.loops.evaluation import Evaluation, evaluate, standing
from recipes.loops.grpo import GrpoLoop
from recipes.loops.sink import Sink
from recipes.setup.preparation import Setup, prepare
from recipes.tasks.scoring import open_rewards
from tests.helpers.recipes.fake_sides import FakeRollout, FakeTrainer
from trainer_bridge import Cycle

STEPS, EVERY = 8, 2
WORDS = [
    *("loop.prompts_per_step=2", "loop.samples_per_prompt=2", "checkpoint.export_every=0"),
    *(f"steps={STEPS}", f"eval.every={EVERY}", "eval.problems=1", "checkpoint.every=3"),
]


class Rows(Sink):
    """Sink that keeps rows, and nothing that a loop could ask for."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


@cache
def prepared(folder: Path) -> Setup:
    return prepare(load("tiny", WORDS), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def make_loop(folder: Path, patience: int, **fields: Any) -> tuple[GrpoLoop, list[tuple[Any, ...]]]:
    """Build a loop over sides without tensors; return it with the calls that it will make."""
    recipe = load("tiny", [*WORDS, f"eval.patience={patience}"])
    setup = dataclasses.replace(prepared(folder), recipe=recipe)
    trainer, calls = FakeTrainer(), list[tuple[Any, ...]]()
    rollout: Any = FakeRollout(trainer, setup.tokenizer)
    sides: dict[str, Any] = {"trainer": trainer, "rollout": rollout}
    loop = GrpoLoop(
        setup=setup,
        **sides,
        cycle=Cycle(**sides, **cycle_arguments(setup)),
        rewards=open_rewards(setup.tasks, setup.recipe.task, workers=0),
        save=lambda step, drawn: calls.append(("save", step, drawn)),
        complete=lambda wait: bool(calls.append(("complete", wait)) or wait),
        mark_best=lambda step: calls.append(("best", step)),
        export=lambda step: calls.append(("export", step)),
        **fields,
    )
    return loop, calls


def judge(patch: pytest.MonkeyPatch, values: Sequence[float]) -> None:
    """Let evaluations report `values`, by their order among all evaluations of a run."""

    def judged(rollout: Any, *arguments: Any) -> Evaluation:
        evaluation = evaluate(rollout, *arguments)
        row = {"correct": values[(rollout.weights_version - 1) // EVERY]}
        return Evaluation(row=row, samples=evaluation.samples, scores=evaluation.scores)

    patch.setattr("recipes.loops.loop.evaluate", judged)


qualities = st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=STEPS // EVERY + 1)


@settings(max_examples=20, deadline=None)
@given(qualities, st.integers(0, 3), st.integers(1, STEPS - 1))
def test_loop_without_files_decides_as_the_evaluations_say_also_in_two_parts(
    folder: Path, values: list[float], patience: int, cut: int
) -> None:
    """Compare with the first evaluation that ends the run; then continue from a checkpoint."""
    places = range(0, STEPS + 1, EVERY)
    judged = [{"step": at, "correct": values[at // EVERY]} for at in places]
    ends = [
        row["step"]
        for n, row in enumerate(judged, 1)
        if patience and (best := standing(judged[:n], "correct")) and best.since >= patience
    ]
    with pytest.MonkeyPatch.context() as patch:
        judge(patch, values)
        loop, calls = make_loop(folder, patience, sink=(sink := Rows()))
        loop.run()
        end = min([*ends, STEPS])
        assert loop.updates == end and calls[-1] == ("export", end)
        best = standing(judged[: end // EVERY + 1], "correct")
        assert loop.standing == best and best is not None
        assert [call for call in calls if call[0] == "best"][-1] == ("best", best.step)
        waited = [at for at, call in enumerate(calls) if call == ("complete", True)]
        assert all(at < waited[-1] for at, call in enumerate(calls) if call[0] == "save")
        saved = [call[1] for call in calls if call[0] == "save"]
        assert {best.step, end} - {0} <= {*saved} and len(saved) == len({*saved})
        kinds = [row["step"] for row in sink.rows if row["kind"] == "train"]
        assert kinds == list(range(1, end + 1)) and loop.evaluations == [
            row for row in sink.rows if row["kind"] == "eval"
        ]
        if cut not in saved or cut >= end:
            return
        before = [row for row in loop.evaluations if row["step"] <= cut]
        drawn = next(call[2] for call in calls if call[:2] == ("save", cut))
        again, more = make_loop(folder, patience, updates=cut, drawn=drawn, evaluations=before)
        again.run()
        assert (again.updates, again.standing, again.drawn) == (end, best, loop.drawn)
        assert more[-1] == ("export", end)
