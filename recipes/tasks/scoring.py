"""Rewards of a run: the reward functions of its sets, or the scorers of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recipes.config.sections import ProblemSection, TaskSection
from recipes.rewards import Answer, Rewards, RewardSet
from recipes.tasks.gym import PREFIX
from recipes.tasks.problem import Problem, Scorer, Task, Tasks

Build = Callable[[ProblemSection], Task]
"""A function at the top of a module, which workers call again."""


class TaskScorer:
    """The scorer of a task as a reward function.

    The scorer of a custom task is called in worker processes. A worker gets only the section and
    builds the task again, because a scorer may be a function inside a function, which cannot be
    sent.

    Args:
        score: The scorer.
        section: Section of the task; None: the scorer is called in this process.
        build: Builds the task from its section.
    """

    scores_task = True

    def __init__(
        self, score: Scorer, section: ProblemSection | None = None, build: Build | None = None
    ) -> None:
        self.label = section.name if section else "scorer"
        self.trusted = ":" not in self.label or self.label.startswith(PREFIX)
        self._score = score
        self._section = section
        self._build = build

    def __call__(
        self, prompt: Any, completion: str, answer: str, ended: bool, **columns: Any
    ) -> Any:
        """Call the scorer and return its result."""
        columns.pop("completion_ids", None)
        problem = Problem(prompt=prompt, answer=answer, columns=columns)
        return self._score(problem, completion, ended)

    def __reduce__(self) -> tuple[Callable[..., TaskScorer], tuple[Any, ...]]:
        return _rebuilt, (self._section, self._build)


def _rebuilt(section: ProblemSection, build: Build) -> TaskScorer:
    return TaskScorer(build(section).score, section, build)


def reward_set(section: ProblemSection, score: Scorer, build: Build, key: str) -> RewardSet:
    """Return the reward functions of a set, or its own scorer if the section names none."""
    functions: Sequence[Any] = section.rewards or [TaskScorer(score, section, build)]
    options: Any = {"weights": section.reward_weights, "extract": section.extract, "key": key}
    return RewardSet(functions=functions, **options)


def open_rewards(tasks: Tasks, section: TaskSection, **options: Any) -> Rewards:
    """Return the rewards of a run, with further arguments of `Rewards` in `options`."""
    own = {task.name: RewardSet(functions=[TaskScorer(task.score)]) for task in tasks.all}
    sets = own | {task.name: task.rewards for task in tasks.all if task.rewards}
    return Rewards(sets, **{"timeout": section.timeout, "workers": section.workers, **options})


def to_answer(task: Task, problem: Problem, text: str, ended: bool, ids: Sequence[int]) -> Answer:
    """Return an answer to a problem of a set, for `Rewards`."""
    return Answer(
        prompt=problem.prompt,
        text=text,
        answer=problem.answer,
        ended=ended,
        columns=problem.columns,
        token_ids=ids,
        set=task.name,
    )


def try_rewards(tasks: Tasks, section: TaskSection) -> None:
    """Call each reward function on a right answer, before the run generates any.

    Raises:
        RecipeError: A function cannot be found, or fails.
    """
    first = [(task, task.problems()[0]) for task in tasks.all]
    answers = [to_answer(task, problem, problem.answer, True, ()) for task, problem in first]
    with open_rewards(tasks, section, most_workers=1) as rewards:
        rewards.check(answers)
