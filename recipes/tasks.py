"""Tasks: problems, their split, and how an answer is read and scored.

`task.name=package.module:function` names a task of one's own: `function(section)` gets the recipe's
`TaskSection` and returns a `Task`; `split` deals its problems out.

A problem is held out when a hash of what it asks says so: of its question's text, or of what a task
names as the same question (a sum in any order of its terms). The split depends on nothing else, so
that no seed, step or resume can bring a held-out question into training.
"""

import contextlib
import importlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from memsaver.ops.hash import hash_text
from recipes.config.models import TaskSection
from recipes.errors import RecipeError, ScorerError, one_line, shown

TOY_LETTERS = "abcdefgh"
TOY_WORDS = ["first", "of", *TOY_LETTERS]
TERM = re.compile(r"([-+]?) ?(\d+)")
NUMBER = re.compile(r"(?<![\d.])[-+]?\d[\d,]*(?:\.\d+)?")
LARGEST_REWARD = 3e38  # the trainer takes advantages in fp32


@dataclass(frozen=True, kw_only=True)
class Problem:
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """`reward` is what training sees; `exact` alone is reported as exact match.

    Both may be numbers of Python or numpy, bools, or tensors of one element.
    """

    reward: float
    exact: bool


# (problem, completion text, did it end by itself); a bare number is a reward
Scorer = Callable[[Problem, str, bool], Score | float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """`words`: all that questions and answers are made of, for a random model's tokenizer; none:
    real models only.

    Evaluations take the first so many of what is held out, so its order should mean nothing
    (`split` sees to it).
    """

    name: str
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    score: Scorer
    # Other kinds; as many of each a step.
    also_train: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    # Held out, too, of other kinds: "2_digits".
    beside: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[Problem, ...], ...]:
        """Return what is trained on, the task's own kind first."""
        return (self.train, *self.also_train.values())

    @property
    def sides(self) -> tuple[tuple[Problem, ...], ...]:
        """Return what is trained on, and what is held out, each of every kind."""
        return (*self.kinds, self.held_out, *self.beside.values())

    def problems(self) -> Iterator[Problem]:
        return itertools.chain(*self.sides)

    def only(self, questions: Container[str]) -> "Task":
        """Return the task without the problems whose question is not among these."""

        def kept(problems: Iterable[Problem]) -> tuple[Problem, ...]:
            return tuple(problem for problem in problems if problem.question in questions)

        beside, trained = self.beside.items(), self.also_train.items()
        return replace(
            self,
            train=kept(self.train),
            held_out=kept(self.held_out),
            also_train={name: kept(problems) for name, problems in trained},
            beside={name: kept(problems) for name, problems in beside},
        )


def make_task(section: TaskSection, also_digits: Sequence[int] = ()) -> Task:
    """also_digits: of the numbers in problems evaluated beside the task's own, chain_sum only.

    Raises RecipeError when there is nothing to train or to evaluate on, or `section.name` leads to
    no task.
    """
    task = _own_task(section) if ":" in section.name else _packaged_task(section, also_digits)
    key = "task.held_out_fraction"
    check_sides(task, f"{key}={section.held_out_fraction}", f"set {key}=0.2")
    return task


def check_sides(task: Task, setting: str, remedy: str) -> None:
    """Raise RecipeError of the setting where it leaves nothing to train or to evaluate on."""
    if not all(task.sides):
        empty = "evaluation" if all(task.kinds) else "training"
        raise RecipeError(f"{setting}: leaves no problem for {empty}; {remedy}")


def score_answer(task: Task, problem: Problem, text: str, ended: bool) -> Score:
    """Return what the task's scorer says of an answer, as a float and a bool.

    A bare number is the reward, and an exact match where it is at least 1.

    Raises:
        ScorerError: The scorer raised, or its reward or `exact` is none.
    """
    try:
        found = task.score(problem, text, ended)
    except (Exception, SystemExit) as error:
        raised = f"raised {type(error).__name__}: {shown(one_line(error), 200)}"
        where = _place_of(error, task.score)
        raise _scorer_error(task, problem, text, f"{raised} ({where})", "correct it") from error
    try:
        reward = as_reward(getattr(found, "reward", found))
        return Score(reward=reward, exact=_as_bool(getattr(found, "exact", reward >= 1)))
    except ValueError as error:
        remedy = "return a Score(reward=NUMBER, exact=BOOL), or a number"
        raise _scorer_error(task, problem, text, f"gave {error}", remedy) from None


def _scorer_error(task: Task, problem: Problem, text: str, why: str, remedy: str) -> ScorerError:
    about = f"for the answer {shown(repr(text), 60)} to {shown(repr(problem.question), 60)}"
    return ScorerError(f"task.name={task.name}: the scorer {why}, {about}; {remedy}")


def as_reward(value: Any) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: It is no number, or not a finite one of fp32's range.
    """
    value = _scalar(value)
    if not isinstance(value, int | float):
        raise ValueError(f"a reward of type {type(value).__name__}")
    if not abs(value) <= LARGEST_REWARD:
        raise ValueError(f"a reward of {shown(value, 40)}, not finite in fp32")
    return float(value)


def _as_bool(value: Any) -> bool:
    value = _scalar(value)
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(f"exact={shown(repr(value), 40)}, neither true nor false")


def _scalar(value: Any) -> Any:
    """Return the only element of a tensor or a numpy array; anything else unchanged."""
    with contextlib.suppress(ValueError, RuntimeError, TypeError):  # of several elements
        return value.item() if hasattr(value, "item") else value
    return value


def _place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return file:line of the function where it raised, or of its head if it was not entered."""
    if frames := traceback.extract_tb(error.__traceback__)[1:2]:
        return f"{frames[0].filename}:{frames[0].lineno}"
    code = getattr(function, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else shown(function)
    return f"{place}, called with (problem, text, ended)"


class Sides(TypedDict):
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def split(problems: Sequence[Problem], fraction: float, same: Callable[[str], str] = str) -> Sides:
    """Return `train` and `held_out`: about `fraction` of all problems are held out, whatever
    their order.

    same: a text that questions have in common which must not be parted: who has learnt one can
    answer the other.
    """
    sides: dict[bool, list[Problem]] = {False: [], True: []}
    for problem in problems:
        sides[is_held_out(same(problem.question), fraction)].append(problem)
    in_no_order = sorted(sides[True], key=lambda problem: hash_text(problem.question))
    return {"train": tuple(sides[False]), "held_out": tuple(in_no_order)}


def _packaged_task(section: TaskSection, also_digits: Sequence[int]) -> Task:
    fraction = section.held_out_fraction
    if section.name == "toy":
        problems, score = _toy(section)
        return Task(name="toy", **split(problems, fraction), score=score, words=tuple(TOY_WORDS))
    problems, score = _chain_sum(section, section.num_digits)
    others = {
        digits: split(_chain_sum(section, digits)[0], fraction, signed_terms)
        for digits in {*section.also_train_digits, *also_digits}
    }
    return Task(
        name=section.name,
        **split(problems, fraction, signed_terms),
        also_train={
            f"{digits}_digits": others[digits]["train"] for digits in section.also_train_digits
        },
        beside={f"{digits}_digits": others[digits]["held_out"] for digits in also_digits},
        score=score,
    )


def _own_task(section: TaskSection) -> Task:
    """Return the task that `module:function` makes; the working directory is searched, too."""
    module_name, _, name = section.name.partition(":")
    key = f"task.name={section.name}"
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot import {module_name}: {type(error).__name__}: {one_line(error)}"
        raise RecipeError(
            f"{key}: {rule}; run from the folder it lies in, or set PYTHONPATH"
        ) from error
    if not callable(function):
        rule = f"{module_name} has no function {name}; define it, or correct the name"
        raise RecipeError(f"{key}: {rule}")
    try:
        task = function(section)
    except (Exception, SystemExit) as error:
        rule = f"raised {type(error).__name__}: {one_line(error)}"
        raise RecipeError(f"{key}: {rule}; correct it (--verbose shows where)") from error
    if not isinstance(task, Task):
        raise RecipeError(f"{key}: returned a {type(task).__name__}; return a recipes.tasks.Task")
    return replace(task, name=section.name)


def is_held_out(question: str, fraction: float) -> bool:
    """Return True for about `fraction` of all texts, by the first 64 bits of SHA-256."""
    return hash_text(question) < fraction * 2**64


def signed_terms(question: str) -> str:
    """Return the terms of a sum, sorted, with signs: what a sum has in common with those of
    another order.

    >>> signed_terms("What is 4 + 3 - 12 ="), signed_terms("What is 3 - 12 + 4 =")
    ('+3 +4 -12', '+3 +4 -12')
    """
    found = TERM.findall(question)
    return " ".join(sorted((sign or "+") + number for sign, number in found))


def _toy(section: TaskSection) -> tuple[list[Problem], Scorer]:
    """Return problems and scorer: `first of b e` is answered `b`, for every pair of letters."""
    letters = itertools.product(TOY_LETTERS, repeat=2)
    problems = [Problem(question=f"first of {a} {b}", answer=a) for a, b in letters]

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Exact: the answer, alone, and the end. A near miss: the answer, then something else."""
        words = text.split()
        exact = ended and words == [problem.answer]
        near = words[:1] == [problem.answer]
        return Score(reward=1.0 if exact else section.partial_credit * near, exact=exact)

    return problems, score


def _chain_sum(section: TaskSection, digits: int) -> tuple[list[Problem], Scorer]:
    """Return the distinct problems among `size` draws of reasoning-gym, and its own scorer."""
    try:
        import reasoning_gym
    except ImportError as error:
        rule = f"needs reasoning-gym ({one_line(error)}); run: pip install 'memsaver[models]'"
        raise RecipeError(f"task.name=chain_sum: {rule}") from None
    terms = section.num_terms
    limits = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
    size = 6000  # two terms of one digit: 200 distinct problems, all of them among so many draws
    dataset: Any = reasoning_gym.create_dataset("chain_sum", seed=0, size=size, **limits)
    answers = {entry["question"]: entry["answer"] for entry in dataset}

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Exact: it ended by itself and reasoning-gym scores the last number 1.0; else 0."""
        graded = dataset.score_answer(extract_number(text), {"answer": problem.answer})
        exact = ended and graded == 1.0
        return Score(reward=float(exact), exact=exact)

    problems = [
        Problem(question=question, answer=answer) for question, answer in sorted(answers.items())
    ]
    return problems, score


def extract_number(text: str) -> str | None:
    """Return the last number of a text, with its sign; a minus between two is an operator, not a
    sign.

    >>> extract_number("5 - 9 = -4."), extract_number("9-4"), extract_number("none")
    ('-4', '4', None)
    """
    plain = text.replace("\u2212", "-")
    found = list(NUMBER.finditer(plain))
    if not found:
        return None
    number = found[-1].group().rstrip(",")
    before = plain[: found[-1].start()].rstrip()
    return number.lstrip("+-") if before[-1:].isdigit() else number.lstrip("+")
