"""Rewards of a run: the reward functions of its sets, or the scorers of their tasks."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipes.config.sections import ProblemSection, TaskSection
from recipes.errors import shown
from recipes.rewards import Answer, Rewards, RewardSet, Scored
from recipes.rewards.extract import extract_expected
from recipes.rewards.function import ARGUMENTS, BATCHED, PREFIX
from recipes.rewards.reward_set import EnvironmentReward, evaluates, is_linear
from recipes.tasks.problem import Problem, Score, Scorer, Task, Tasks

Build = Callable[[ProblemSection], Task]
"""A function at the top of a module, which workers call again."""
TRIALS = 16
"""Expected answers of each set that are scored before a run."""
OURS = ", ours"
"""Ends the name of a set with the functions of ours alone, in the trial."""
FORMS = {"boxed": r"\boxed{{{}}}", "tag": "<answer>{}</answer>"}
"""How a right answer looks, by `task.extract`."""


class TaskScorer:
    """The scorer of a task as a reward function.

    The scorer of a custom task is called in worker processes. A worker gets only the section and
    builds the task again, because a scorer may be a function inside a function, which cannot be
    sent. A scorer that evaluates answers can be sent, and has an attribute `evaluates`.

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
        self.evaluates = getattr(score, "evaluates", False)
        self.linear = ":" not in self.label and not self.evaluates
        self.memory = getattr(score, "memory", None)
        self._score = score
        self._section = section
        self._build = build

    def __call__(self, problem: Problem, text: str, ended: bool) -> Any:
        """Call the scorer and return its result."""
        return self._score(problem, text, ended)

    def __reduce__(self) -> "tuple[Callable[..., TaskScorer], tuple[Any, ...]]":
        if self.evaluates:
            return TaskScorer, (self._score, self._section)
        return _rebuilt, (self._section, self._build)


def _rebuilt(section: ProblemSection, build: Build) -> TaskScorer:
    return TaskScorer(build(section).score, section, build)


def reward_set(section: ProblemSection, task: Task, build: Build, key: str) -> RewardSet:
    """Return the reward functions of a set, or its own scorer if the section names none."""
    columns: dict[str, None] = {}
    functions: list[Any] = [*section.rewards]
    if task.environments:
        classes = dict.fromkeys(task.environments.values())
        key = "agent" if task.agent else "environment"
        functions.insert(0, EnvironmentReward("+".join(classes), key=key))
    for problem in task.problems():
        columns |= dict.fromkeys(problem.columns)
    return RewardSet(
        functions=functions or [TaskScorer(task.score, section, build)],
        weights=section.reward_weights,
        extract=section.extract,
        columns=tuple(columns),
        answer_column=section.answer_column,
        correct_by=section.correct_by,
        key=key,
    )


def rewards_of(task: Task) -> RewardSet:
    return task.rewards or RewardSet(functions=[TaskScorer(task.score)])


def open_rewards(tasks: Tasks, section: TaskSection, **options: Any) -> Rewards:
    """Return the rewards of a run, with further arguments of `Rewards` in `options`."""
    return _open({task.name: rewards_of(task) for task in tasks.all}, section, **options)


def _open(sets: Mapping[str, RewardSet], section: TaskSection, **options: Any) -> Rewards:
    timeout, concurrency = section.timeout, section.concurrency
    workers = options.pop("workers", section.workers)
    return Rewards(sets, timeout=timeout, workers=workers, concurrency=concurrency, **options)


def to_answer(
    task: Task,
    problem: Problem,
    text: str,
    ended: bool,
    ids: Sequence[int],
    rendered_prompt: str = "",
    earned: Mapping[str, Score] | None = None,
) -> Answer:
    """Return an answer to a problem of a set, for `Rewards`."""
    return Answer(
        prompt=problem.prompt,
        text=text,
        answer=problem.answer,
        ended=ended,
        columns=problem.columns,
        token_ids=ids,
        set=task.name,
        rendered_prompt=rendered_prompt or problem.text,
        problem=problem,
        earned=earned or {},
    )


def try_rewards(tasks: Tasks, section: TaskSection) -> None:
    """Score expected answers of each set, before the run generates any.

    All functions are called for the first problem of a set. Packaged functions and the scorers of
    packaged tasks are called for `TRIALS` problems. Lines on standard error say how many expected
    answers do not count as correct, and which columns reward functions get under another name.

    Raises:
        RecipeError: A function cannot be found, or fails.
    """
    sets, answers = dict[str, RewardSet](), list[Answer]()
    for task in tasks.all:
        sets |= {task.name: rewards_of(task), task.name + OURS: _ours(rewards_of(task))}
        answers.append(_right(task, task.problems()[0]))
        if sets[task.name + OURS].functions:
            several = [_right(task, problem) for problem in task.problems()[:TRIALS]]
            answers += [replace(answer, set=task.name + OURS) for answer in several]
    with _open(sets, section, most_workers=1, note=_say) as rewards:
        scored = rewards.check(answers)
    for task in tasks.all:
        _tell_wrong(task, [item for item in scored if item.answer.set == task.name + OURS])
        _tell_taken(task, rewards_of(task))


def _ours(group: RewardSet) -> RewardSet:
    """Return the set with the functions of ours alone, which may be called for many answers."""
    ours = [item for item in group.functions if is_linear(item) or evaluates(item)]
    functions = [item for item in ours if not isinstance(item, EnvironmentReward)]
    return replace(group, functions=functions, weights=(), correct_by=None)


def _right(task: Task, problem: Problem) -> Answer:
    """Return the expected answer in the form that `extract` asks for."""
    what, text = rewards_of(task).extract, problem.answer
    if what in FORMS:
        text = FORMS[what].format(extract_expected(what, text))
    return to_answer(task, problem, text, True, ())


def _tell_wrong(task: Task, scored: Sequence[Scored]) -> None:
    group, named = rewards_of(task), [item for item in scored if item.answer.answer]
    wrong = [item.answer.answer for item in named if not item.correct]
    texts = {"get less than full marks": wrong}
    if {"file", "exact_match"} & {*group.labels}:  # which compare the whole text
        parts = [extract_expected(group.extract, item.answer.answer) for item in named]
        texts["have several lines, all of which an answer must have"] = [
            part for part in parts if "\n" in part
        ]
    for rule, answers in texts.items():
        if answers:
            which = f"{len(answers)} of the first {len(named)} expected answers {rule}"
            remedy = "look at task.extract and the answer column"
            _say(f"{task.source}: {which}, such as {shown(repr(answers[0]), 60)}; {remedy}")


def _tell_taken(task: Task, group: RewardSet) -> None:
    """Name the columns that have the name of an argument."""
    first = task.problems()[0]
    own = {group.answer_column or "answer"}
    if first.columns.get("prompt") in (first.prompt, [*first.turns]):
        own.add("prompt")
    arguments = {*ARGUMENTS, *BATCHED.values()} - own
    for name in group.columns:
        if name in arguments:
            rule = f"reward functions with an argument {name} get the column as {PREFIX}{name}"
            _say(f"{task.source}: {rule}")


def _say(text: str) -> None:
    print(f"memsaver: {text}", file=sys.stderr)
