"""Evaluation outside of a run: the model of a recipe, of a run's checkpoint, or of any folder."""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from recipes.arguments import engine_arguments
from recipes.config.decisions import Decisions
from recipes.config.load import find_recipe, load
from recipes.config.recipe import Recipe
from recipes.config.sections import LoopSection, ProblemSection, TaskSection
from recipes.errors import RecipeError, one_line, writable
from recipes.export_run import export_run
from recipes.logs.checkpoints import Checkpoints
from recipes.logs.metric_rows import METRICS, numbers_of
from recipes.logs.recorded_samples import records_of
from recipes.logs.run_folder import RunFolder
from recipes.logs.view import ProgressView
from recipes.loops.evaluation import (
    Evaluation,
    answer_held_out,
    evaluation_of,
    problem_sets,
    prompts_of,
)
from recipes.loops.figures import renamed
from recipes.loops.sampling import Samples
from recipes.rewards import Rewards, Scored
from recipes.setup.model_files import FETCHED, find_model
from recipes.setup.preparation import Setup, prepare
from recipes.tasks import Problem, Task
from recipes.tasks.scoring import open_rewards
from rollout import Rollout
from rollout.actor import build_engine
from trainer_bridge.models import read_values

ALL = 2**31 - 1  # problems of a set, without a limit
WAVES = 4  # of running requests in a call of the engine, between which the progress is shown


@dataclass(frozen=True, kw_only=True)
class Question:
    """What an evaluation asks besides the model.

    Attributes:
        recipe: Recipe with the sets of problems; None: the run's own, or none.
        overrides: `key=value` settings of the recipe.
        data: A data file as the only set, all of it.
        rewards: Reward functions of that file; empty: the expected answer alone decides.
        limit: Largest number of problems of each set; None: `eval.problems`, or all of `data`.
    """

    recipe: str | None = None
    overrides: Sequence[str] = ()
    data: str | None = None
    rewards: Sequence[str] = ()
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A model with the recipe that evaluates it, and what its run has kept."""

    model: str
    recipe: Recipe
    step: int = 0
    started: datetime | None = None
    decisions: Decisions | None = None


def evaluate_model(
    subject: str,
    question: Question,
    *,
    step: int | None = None,
    best: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a model as an evaluation of a run does, on one device and without a trainer.

    Args:
        subject: A recipe, whose model is evaluated as it is before a run; the folder of a run; or a
            model: a folder, or ORG/NAME on the Hub.
        question: The problems and how they are answered.
        step: Step of the run's checkpoint; None for the newest.
        best: Take the checkpoint of the best evaluation, whatever `step` is.
        out: Folder to write, new or empty: metrics.jsonl with the row, samples.jsonl with all
            answers. None: nothing is written.

    Returns:
        The row, as an evaluation of a run writes it.

    Raises:
        RecipeError: The subject is none of the three, names no problems, or cannot be evaluated
            here. Nothing was written.
        RunError: The model could not be exported, or the answers not be written.
        KeyboardInterrupt: The evaluation was interrupted. The figures of the problems until then
            were shown and written, marked as partial.
    """
    if question.rewards and question.data is None:
        raise RecipeError("--reward: names functions for the file of --data; give both")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"--out {out}: is not empty; name a new folder; nothing was written")
    with tempfile.TemporaryDirectory(prefix="memsaver-") as folder:
        found = _subject(subject, question, Path(folder), step, best)
        recipe = _without_training(found.recipe, found.model, question)
        setup = prepare(recipe, Path(folder), found.started, found.decisions)
        if out is not None:
            with writable(f"--out {out}"):
                out.mkdir(parents=True, exist_ok=True)
        return _evaluated(setup, subject, found.step, out)


def _subject(
    subject: str, question: Question, folder: Path, step: int | None, best: bool
) -> _Subject:
    path, overrides = Path(subject), question.overrides
    if (path / "recipe.yaml").is_file() and (path / METRICS).is_file():
        return _of_run(path, question, folder, step, best)
    if step is not None or best:
        raise RecipeError(f"{'--best' if best else '--step'}: {subject} holds no run; name a run")
    if (path / "config.json").is_file() or (subject == FETCHED and question.recipe):
        return _of_model(subject, question, folder)
    try:
        file = find_recipe(subject)
    except RecipeError as error:
        if "/" in subject and not path.exists():  # ORG/NAME
            return _of_model(subject, question, folder)
        hint = one_line(error).partition("; ")[2]
        rule = "is neither a recipe, nor the folder of a run or of a model"
        raise RecipeError(f"evaluate {subject}: {rule}; {hint}") from None
    if question.recipe is not None:
        raise RecipeError(f"--recipe: {subject} is a recipe itself; give a run or a model with it")
    recipe = load(file, overrides)
    if recipe.model.path is None:
        rule = "its model has random weights, of which only a run's checkpoint can be evaluated"
        raise RecipeError(f"evaluate {subject}: {rule}; name a run, or set model.path")
    return _Subject(model=recipe.model.path, recipe=recipe)


def _of_run(run: Path, question: Question, folder: Path, step: int | None, best: bool) -> _Subject:
    checkpoints, own = Checkpoints(run), load(run / "recipe.yaml")
    checkpoint = (checkpoints.best() if best else None) or checkpoints.of(step)
    model = folder / "model"
    how: dict[str, Any] = {"merge_adapters": bool(own.lora.rank), "best": best}
    done = int(checkpoint.name.removeprefix("step_"))
    export_run(run, model, step=done, **how)
    values = read_values(str(checkpoint))["extra"]
    started = datetime.fromisoformat(values["started"]) if "started" in values else None
    recipe = load(question.recipe or run / "recipe.yaml", question.overrides)
    kept = Decisions.lasting(values)
    return _Subject(model=str(model), recipe=recipe, step=done, started=started, decisions=kept)


def _of_model(subject: str, question: Question, folder: Path) -> _Subject:
    """Return a model with a recipe, or else with the defaults of a recipe and no set of its own."""
    model = str(find_model(subject))
    if question.recipe is not None:
        return _Subject(model=model, recipe=load(question.recipe, question.overrides))
    file = folder / "defaults.yaml"
    file.write_text(json.dumps({"model": {"path": model}, "task": {"name": "toy"}, "steps": 1}))
    recipe = load(file, question.overrides)
    if question.data is None and not recipe.eval.sets:
        remedy = "give --data FILE and --reward FUNCTION, or --recipe RECIPE"
        raise RecipeError(f"evaluate {subject}: a model alone has no problems to answer; {remedy}")
    return _Subject(model=model, recipe=replace(recipe, task=_only_training(recipe.task)))


def _only_training(task: TaskSection) -> TaskSection:
    """Return the task without held-out problems, so that `eval.sets` are all that is evaluated."""
    mixture = [replace(part, held_out_fraction=0.0) for part in task.mixture]
    return replace(task, held_out_fraction=0.0, mixture=mixture)


def _without_training(recipe: Recipe, model: str, question: Question) -> Recipe:
    """Return the part of a recipe that evaluations read, for one device."""
    task, sets, most = recipe.task, recipe.eval.sets, question.limit or recipe.eval.problems
    if question.data is not None:
        file = ProblemSection(name="file", data=question.data, rewards=[*question.rewards])
        task, sets, most = _only_training(task), [file], question.limit or ALL
    return Recipe(
        model=replace(recipe.model, path=model, shape=None, config=None),
        task=task,
        steps=1,
        engine=replace(recipe.engine, tensor_parallel_size=1, expert_parallel=1),
        sampling=recipe.sampling,
        loop=LoopSection(prompts_per_step=1),
        eval=replace(recipe.eval, every=1, sets=sets, problems=most, best=None, patience=0),
        exact=recipe.exact,
        driver="inprocess",
        device=recipe.device,
        seed=recipe.seed,
    )


def _evaluated(setup: Setup, subject: str, step: int, out: Path | None) -> dict[str, Any]:
    view = ProgressView(1)
    try:
        view.note(f"{subject}: {_conditions(setup)}")
        with contextlib.ExitStack() as stack:
            rewards = open_rewards(setup.tasks, setup.recipe.task, note=view.note)
            stack.enter_context(contextlib.closing(rewards))
            view.stage("build_engine")
            rollout = stack.enter_context(_opened(setup))
            view.stage("evaluate")
            evaluation, missing = _answered(rollout, setup, rewards, view.note)
        row = renamed({"kind": "eval", "step": step, **evaluation.row})
        row |= {"partial": True} if missing else {}
        if out is not None:
            samples = records_of([(evaluation.samples, evaluation.scores)], row, ALL)
            RunFolder(out).add_row(row, samples)
        figures = " | ".join(f"{name} {value:.4g}" for name, value in numbers_of(row).items())
        view.note(f"{'interrupted; partial: ' if missing else ''}{figures}")
    finally:
        view.close()
    if missing:
        error = KeyboardInterrupt()
        error.add_note(f"evaluation: {missing} problems have no answer yet; figures are partial")
        raise error
    return row


def _conditions(setup: Setup) -> str:
    """Return how the answers come about, with the defaults that nobody named."""
    recipe = setup.recipe
    how = f"temperature {recipe.eval.temperature:g}" if recipe.eval.temperature else "greedy"
    count = recipe.eval.samples
    answers = f"{count} answers to each problem, {how}" if count > 1 else how
    template = "plain text" if setup.template is None else "the chat template"
    sets = ", ".join(f"{task.name} ({len(found)})" for task, found in problem_sets(setup))
    parts = [sets, answers, f"at most {recipe.sampling.max_tokens} tokens", f"prompts: {template}"]
    return "; ".join([*parts, f"{recipe.engine.kind} engine, {recipe.model.dtype}, {setup.device}"])


@contextlib.contextmanager
def _opened(setup: Setup) -> Iterator[Rollout]:
    arguments = engine_arguments(setup)
    arguments |= {"path": str(setup.model_dir), "device": setup.device}
    arguments["dtype"] = getattr(torch, arguments["dtype"])
    rollout, close = build_engine(arguments.pop("kind"), arguments)
    try:
        yield rollout
    finally:
        close()


def _answered(
    rollout: Rollout, setup: Setup, rewards: Rewards, note: Callable[[str], None]
) -> tuple[Evaluation, int]:
    """Return the evaluation, and how many problems an interrupt has left without answers.

    Raises:
        KeyboardInterrupt: No problem has been answered before the interrupt.
    """
    sets, count = problem_sets(setup), setup.recipe.eval.samples
    prompts = prompts_of(sets)
    size = max(1, WAVES * setup.recipe.engine.max_running // count)
    parts: list[tuple[Samples, Callable[[], list[Scored]]]] = []
    done = 0
    try:
        for begin in range(0, len(prompts), size):
            samples = answer_held_out(rollout, setup, prompts[begin : begin + size])
            parts.append((samples, rewards.submit(samples.answers())))
            done += len(samples.texts) // count
            if done < len(prompts):
                note(f"{done} of {len(prompts)} problems answered")
    except KeyboardInterrupt:
        if not parts:
            raise
    scores = list(itertools.chain.from_iterable(waiting() for _, waiting in parts))
    samples = Samples.joined([samples for samples, _ in parts])
    return evaluation_of(_first(sets, done), samples, scores, count), len(prompts) - done


def _first(
    sets: Sequence[tuple[Task, Sequence[Problem]]], count: int
) -> list[tuple[Task, Sequence[Problem]]]:
    """Return the sets with their first `count` problems in all, without empty sets."""
    first: list[tuple[Task, Sequence[Problem]]] = []
    for task, found in sets:
        if found[:count]:
            first.append((task, found[:count]))
            count -= len(first[-1][1])
    return first
