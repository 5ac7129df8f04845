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

from memsaver.system.files import replace_text
from recipes.arguments import engine_arguments
from recipes.config.decisions import Decisions
from recipes.config.load import find_recipe, load
from recipes.config.recipe import Recipe
from recipes.config.sections import LoopSection, TaskSection
from recipes.errors import RecipeError, RunError, check_empty, counted, one_line, typed, writable
from recipes.export_run import export_run
from recipes.logs.checkpoints import Checkpoints
from recipes.logs.metric_rows import METRICS, SAMPLES, json_lines, numbers_of
from recipes.logs.recorded_samples import records_of
from recipes.logs.view import ProgressView
from recipes.loops.evaluation import Evaluation, answer_held_out, evaluation_of, held_out_prompts
from recipes.loops.sampling import Samples, rewarded
from recipes.rewards import Rewards, Scored
from recipes.setup.model_files import FETCHED, find_model
from recipes.setup.preparation import Setup, prepare
from recipes.tasks.scoring import open_rewards
from recipes.tasks.task_sources import evaluated_tasks
from rollout import Rollout
from rollout.actor import build_engine
from trainer_bridge.models import read_values

ALL = 2**31 - 1  # problems of a set, without a limit
WAVES = 4  # of running requests in a call of the engine, between which the progress is shown
SECTIONS = ("model", "task", "engine", "sampling", "eval", "exact", "device", "seed")
UNUSED = ("engine.tensor_parallel_size", "engine.expert_parallel")
UNUSED_EVAL = ("eval.every", "eval.best", "eval.patience")
OF_ALL_SETS = ("system_prompt", "template", "template_arguments", "max_prompt_tokens")
OF_REWARDS = ("timeout", "workers", "concurrency")


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

    @property
    def settings(self) -> list[str]:
        """Return the overrides, after those that make `data` the only set."""
        if self.data is None:
            return [*self.overrides]
        file = {"name": "file", "data": self.data, "rewards": [*self.rewards]}
        only = [
            "task.label=_",
            "task.mixture=[]",
            "eval.every=1",
            f"eval.sets=[{json.dumps(file)}]",
        ]
        return [*only, *self.overrides]

    def check(self) -> None:
        """Refuse settings that do not fit each other, or have no effect on an evaluation."""
        if self.rewards and self.data is None:
            raise RecipeError("--reward: names functions for the file of --data; give both")
        for override in self.overrides:
            key = override.partition("=")[0]
            if key == "eval.sets" and self.data is not None:
                raise RecipeError("--data: replaces eval.sets; name the file in one of the two")
            if key in UNUSED:
                raise RecipeError(f"{override}: an evaluation runs on one device; drop it")
            if key in UNUSED_EVAL or key.partition(".")[0] not in SECTIONS:
                raise RecipeError(f"{override}: has no effect on an evaluation; drop it")

    def check_model(self, subject: str) -> None:
        """Refuse overrides that would name another model than the subject."""
        for override in self.overrides:
            if override.startswith(("model.path=", "model.shape=", "model.config")):
                raise RecipeError(f"{override}: the model to evaluate is {subject}; drop it")


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A model with the recipe that evaluates it, and what its run has kept.

    Without `trained`, the recipe's `eval.sets` are all that is evaluated.
    """

    model: str
    recipe: Recipe
    trained: bool
    step: int = 0
    started: datetime | None = None
    decisions: Decisions | None = None
    sample_all_ids: bool = False  # as the run of a random model does


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
    question.check()
    if out is not None:
        with writable(f"--out {out}"):
            check_empty("--out", out)
    with tempfile.TemporaryDirectory(prefix="memsaver-") as folder:
        found = _subject(subject, question, Path(folder), step, best)
        recipe = _without_training(found, question)
        tasks = None if found.trained else evaluated_tasks(recipe.eval.sets)
        setup = prepare(recipe, Path(folder), found.started, found.decisions, tasks)
        if out is not None:
            with writable(f"--out {out}"):
                out.mkdir(parents=True, exist_ok=True)
        return _evaluated(setup, subject, found, out)


def _subject(
    subject: str, question: Question, folder: Path, step: int | None, best: bool
) -> _Subject:
    path, named = Path(subject), f"evaluate {subject}"
    if (path / "recipe.yaml").is_file() and (path / METRICS).is_file():
        return _of_run(path, question, folder, step, best)
    if step is not None or best:
        raise RecipeError(f"{'--best' if best else '--step'}: {subject} holds no run; name a run")
    if (path / "config.json").is_file() or (subject == FETCHED and question.recipe):
        return _of_model(subject, question, folder)
    if (path / "adapter_config.json").is_file():
        remedy = "name their run, or export the model: memsaver export RUN --merge --to DIR"
        raise RecipeError(f"{named}: holds adapters without their model; {remedy}")
    hint = "name one of them"
    if "/" not in subject or path.is_file() or Path(f"{subject}.yaml").is_file():
        try:
            file = find_recipe(subject)
        except RecipeError as error:
            hint = one_line(error).partition("; ")[2]
        else:
            return _of_recipe(subject, file, question)
    elif subject.count("/") == 1 and not path.parent.exists():  # ORG/NAME
        return _of_model(subject, question, folder)
    rule = "is neither a recipe, nor the folder of a run or of a model"
    raise RecipeError(f"{named}: {rule}; {hint}")


def _of_recipe(subject: str, file: Path, question: Question) -> _Subject:
    if question.recipe is not None:
        raise RecipeError(f"--recipe: {subject} is a recipe itself; give a run or a model with it")
    recipe = load(file, question.settings)
    if recipe.model.path is None:
        rule = "its model has random weights, of which only a run's checkpoint can be evaluated"
        raise RecipeError(f"evaluate {subject}: {rule}; name a run, or set model.path")
    return _of(subject, question, model=recipe.model.path, recipe=recipe)


def _of_run(run: Path, question: Question, folder: Path, step: int | None, best: bool) -> _Subject:
    question.check_model(str(run))
    own = load(run / "recipe.yaml")
    recipe = load(question.recipe or run / "recipe.yaml", question.settings)
    checkpoint = Checkpoints(run).chosen(step, best)
    values = read_values(str(checkpoint))["extra"]
    kept: dict[str, Any] = {"step": int(checkpoint.name.removeprefix("step_"))}
    if "started" in values:
        kept["started"] = datetime.fromisoformat(values["started"])
    kept |= {"decisions": Decisions.lasting(values), "sample_all_ids": own.model.random_init}
    found = _of(str(run), question, model=str(folder / "model"), recipe=recipe, **kept)
    export_run(run, folder / "model", merge_adapters=bool(own.lora.rank), step=found.step)
    return found


def _of_model(subject: str, question: Question, folder: Path) -> _Subject:
    """Return a model with a recipe, or else with the defaults of a recipe and no set of its own."""
    question.check_model(subject)
    if question.recipe is not None:
        recipe = load(question.recipe, question.settings)
        given = {"model": str(find_model(subject)), "sample_all_ids": recipe.model.random_init}
        return _of(subject, question, recipe=recipe, **given)
    file = folder / "defaults.yaml"
    file.write_text(json.dumps({"model": {"path": subject}, "task": {"name": "toy"}, "steps": 1}))
    recipe = load(file, question.settings)
    if not recipe.eval.sets:
        remedy = "give --data FILE and --reward FUNCTION, or --recipe RECIPE"
        raise RecipeError(f"evaluate {subject}: a model alone has no problems to answer; {remedy}")
    return _Subject(model=str(find_model(subject)), recipe=recipe, trained=False)


def _of(subject: str, question: Question, *, recipe: Recipe, **fields: Any) -> _Subject:
    """Return the subject of a recipe with sets of its own, unless `--data` replaces them.

    Raises:
        RecipeError: The recipe has no problems to evaluate on.
    """
    parts = (recipe.task, *recipe.task.mixture)
    if not recipe.eval.sets and not any(part.held_out_fraction for part in parts):
        rule = "its recipe holds no problems out and has no eval.sets; give --data FILE"
        raise RecipeError(f"evaluate {subject}: {rule}")
    return _Subject(recipe=recipe, trained=question.data is None, **fields)


def _without_training(found: _Subject, question: Question) -> Recipe:
    """Return the part of a recipe that evaluations read, for one device."""
    recipe, task, most = found.recipe, found.recipe.task, found.recipe.eval.problems
    if not found.trained:
        kept = {name: getattr(task, name) for name in (*OF_ALL_SETS, *OF_REWARDS)}
        task = TaskSection(name="toy", label="_", **kept)  # It is not built.
    most = question.limit or (most if question.data is None else ALL)
    return Recipe(
        model=replace(recipe.model, path=found.model, shape=None, config=None),
        task=task,
        steps=1,
        engine=replace(recipe.engine, tensor_parallel_size=1, expert_parallel=1),
        sampling=recipe.sampling,
        loop=LoopSection(
            prompts_per_step=1,
            turns=recipe.loop.turns,
            parallel_environments=recipe.loop.parallel_environments,
            agent_timeout=recipe.loop.agent_timeout,
        ),
        eval=replace(recipe.eval, every=1, problems=most, best=None, patience=0),
        exact=recipe.exact,
        driver="inprocess",
        device=recipe.device,
        seed=recipe.seed,
    )


def _evaluated(setup: Setup, subject: str, found: _Subject, out: Path | None) -> dict[str, Any]:
    view = ProgressView(1)
    try:
        view.note(f"{subject}: {_conditions(setup)}")
        with contextlib.ExitStack() as stack:
            rewards = open_rewards(setup.tasks, setup.recipe.task, note=view.note)
            stack.enter_context(contextlib.closing(rewards))
            setup = stack.enter_context(setup.opened())
            with _stage(view, "build_engine"):
                rollout = stack.enter_context(_opened(setup, found.sample_all_ids))
            with _stage(view, "evaluate"):
                evaluation, missing = _answered(rollout, setup, rewards, view.note)
        row = {"kind": "eval", "step": found.step, **evaluation.row}
        row |= {"partial": True} if missing else {}
        figures = " | ".join(f"{name} {value:.4g}" for name, value in numbers_of(row).items())
        view.note(f"{'interrupted; partial: ' if missing else ''}{figures}")
    finally:
        view.close()
    if out is not None:
        _write(out, row, evaluation)
    if missing:
        error = KeyboardInterrupt()
        error.add_note(
            f"evaluation: no answer yet to {counted(missing, 'problem')}; figures are partial"
        )
        raise error
    if not rewarded(evaluation.scores):
        fault = next((score.fault for score in evaluation.scores if score.fault), "")
        raise RunError("evaluate", f"no answer got a reward: {fault or 'all functions gave None'}")
    return row


@contextlib.contextmanager
def _stage(view: ProgressView, name: str) -> Iterator[None]:
    """Show a stage, and turn its failure into a RunError that names it."""
    view.stage(name)
    try:
        yield
    except (RunError, RecipeError):
        raise
    except Exception as error:
        raise RunError(name, typed(error)) from error


def _write(out: Path, row: dict[str, Any], evaluation: Evaluation) -> None:
    samples = records_of([(evaluation.samples, evaluation.scores)], row, ALL)
    try:  # Samples first: while a row exists, its samples do.
        replace_text(out / SAMPLES, json_lines(samples))
        replace_text(out / METRICS, json_lines([row]))
    except OSError as error:
        remedy = "the figures are above; mend that and evaluate again"
        raise RunError(f"writing --out {out}", one_line(error), remedy) from error


def _conditions(setup: Setup) -> str:
    """Return how the answers come about, with the defaults that nobody named."""
    recipe = setup.recipe
    how = f"temperature {recipe.eval.temperature:g}" if recipe.eval.temperature else "greedy"
    count = recipe.eval.samples
    answers = f"{count} answers to each problem, {how}" if count > 1 else how
    template = "plain text" if setup.template is None else "the chat template"
    sets = ", ".join(task.summary() for task in setup.tasks.evaluable)
    parts = [sets, answers, f"at most {recipe.sampling.max_tokens} tokens", f"prompts: {template}"]
    return "; ".join([*parts, f"{recipe.engine.kind} engine, {recipe.model.dtype}, {setup.device}"])


@contextlib.contextmanager
def _opened(setup: Setup, sample_all_ids: bool) -> Iterator[Rollout]:
    arguments = engine_arguments(setup)
    if not setup.recipe.engine.hosted:  # Hosted engines sample all ids always.
        arguments["sample_all_ids"] = sample_all_ids
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
    prompts, count = held_out_prompts(setup), setup.recipe.eval.samples
    size = max(1, WAVES * setup.recipe.engine.max_running // count)
    waiting: list[tuple[Samples, Callable[[], list[Scored]]]] = []
    parts: list[tuple[Samples, list[Scored]]] = []
    try:
        for begin in range(0, len(prompts), size):
            samples = answer_held_out(rollout, setup, prompts[begin : begin + size])
            waiting.append((samples, rewards.submit(samples.answers(), required=False)))
            if begin + size < len(prompts):
                note(f"{begin + size} of {len(prompts)} problems answered")
    except KeyboardInterrupt:
        if not waiting:
            raise
    try:
        parts.extend((samples, scores()) for samples, scores in waiting)
    except KeyboardInterrupt:
        if not parts:
            raise
    samples = Samples.joined([samples for samples, _ in parts])
    scores = list(itertools.chain.from_iterable(scores for _, scores in parts))
    return evaluation_of(samples, scores, count), len(prompts) - len(scores) // count
