"""Problems of tasks, their split, and the scores of answers.

`task.name=package.module:function` names a custom task: `function(section)` gets the recipe's
`TaskSection` and returns a `Task`; `split` divides its problems.

A hash of the question decides whether a problem is held out: a hash of its text, or of a text that
equivalent questions share (a sum in any order of its terms). The split depends on nothing else, so
no seed, step or resume can bring a held-out question into training.
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
LARGEST_REWARD = 3e38  # The trainer takes advantages in fp32.


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question and its answer, as texts."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one answer.

    A scorer may use Python or numpy numbers, bools, or tensors of one element for both fields.

    Attributes:
        reward: The reward that training uses.
        exact: Whether the answer counts as an exact match in the figures.
    """

    reward: float
    exact: bool


# Takes the problem, the answer's text, and whether the answer ended by the end token. A number
# instead of a Score is a reward.
Scorer = Callable[[Problem, str, bool], Score | float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems to train and to evaluate on, and their scorer.

    An evaluation takes the first `eval.problems` of the held-out problems, so their order should be
    arbitrary, as `split` makes it.

    Attributes:
        name: Value of `task.name`.
        train: Problems to train on.
        held_out: Problems to evaluate on.
        score: Scorer of an answer.
        also_train: Problems of further kinds to train on, by kind; a step takes equally many
            problems of each kind.
        beside: Held-out problems of further kinds, by kind, such as "2_digits".
        words: All words of questions and answers, for the tokenizer of a random model; empty: the
            task needs a real model.
    """

    name: str
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    score: Scorer
    also_train: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    beside: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[Problem, ...], ...]:
        """Return the training problems of each kind, the task's own kind first."""
        return (self.train, *self.also_train.values())

    @property
    def sides(self) -> tuple[tuple[Problem, ...], ...]:
        """Return the training problems of each kind, then the held-out problems of each kind."""
        return (*self.kinds, self.held_out, *self.beside.values())

    def problems(self) -> Iterator[Problem]:
        return itertools.chain(*self.sides)

    def only(self, questions: Container[str]) -> "Task":
        """Return the task with only the problems whose question is in `questions`."""

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
    """Build the task of a recipe.

    Args:
        section: The recipe's task section.
        also_digits: Further numbers of digits to evaluate (chain_sum only).

    Raises:
        RecipeError: The task cannot be built, or has no problem to train or to evaluate on.
    """
    task = _own_task(section) if ":" in section.name else _packaged_task(section, also_digits)
    key = "task.held_out_fraction"
    check_sides(task, f"{key}={section.held_out_fraction}", f"set {key}=0.2")
    return task


def check_sides(task: Task, setting: str, remedy: str) -> None:
    """Raise a RecipeError about a setting if it leaves a side of the task without problems."""
    if not all(task.sides):
        empty = "evaluation" if all(task.kinds) else "training"
        raise RecipeError(f"{setting}: leaves no problem for {empty}; {remedy}")


def score_answer(task: Task, problem: Problem, text: str, ended: bool) -> Score:
    """Score an answer and convert the result to a float and a bool.

    If the scorer returns a number, it is the reward, and a reward of at least 1 is an exact match.
    `text` is the answer without its end token, and `ended` tells whether it ended by that token.

    Raises:
        ScorerError: The scorer raised or returned no valid score.
    """
    try:
        score = task.score(problem, text, ended)
    except (Exception, SystemExit) as error:
        raised = f"raised {type(error).__name__}: {shown(one_line(error), 200)}"
        where = _place_of(error, task.score)
        raise _scorer_error(task, problem, text, f"{raised} ({where})", "correct it") from error
    try:
        reward = as_reward(getattr(score, "reward", score))
        return Score(reward=reward, exact=_as_bool(getattr(score, "exact", reward >= 1)))
    except ValueError as error:
        remedy = "return a Score(reward=NUMBER, exact=BOOL), or a number"
        raise _scorer_error(task, problem, text, f"returned {error}", remedy) from None


def _scorer_error(task: Task, problem: Problem, text: str, why: str, remedy: str) -> ScorerError:
    about = f"for the answer {shown(repr(text), 60)} to {shown(repr(problem.question), 60)}"
    return ScorerError(f"task.name={task.name}: the scorer {why}, {about}; {remedy}")


def as_reward(value: Any) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: The value is no number, or not finite in fp32.
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
    with contextlib.suppress(ValueError, RuntimeError, TypeError):  # more than one element
        return value.item() if hasattr(value, "item") else value
    return value


def _place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return file:line at which the function raised, or of its definition if it never ran."""
    if frames := traceback.extract_tb(error.__traceback__)[1:2]:
        return f"{frames[0].filename}:{frames[0].lineno}"
    code = getattr(function, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else shown(function)
    return f"{place}, called with (problem, text, ended)"


class Sides(TypedDict):
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def split(problems: Sequence[Problem], fraction: float, same: Callable[[str], str] = str) -> Sides:
    """Divide problems into `train` and `held_out` by a hash of their questions.

    Args:
        problems: All problems of a kind; their order does not matter.
        fraction: Approximate share to hold out.
        same: Maps a question to a text that equivalent questions share. They land on the same side,
            because a model that has learned one can answer the other.
    """
    sides: dict[bool, list[Problem]] = {False: [], True: []}
    for problem in problems:
        sides[is_held_out(same(problem.question), fraction)].append(problem)
    shuffled = sorted(sides[True], key=lambda problem: hash_text(problem.question))
    return {"train": tuple(sides[False]), "held_out": tuple(shuffled)}


def _packaged_task(section: TaskSection, also_digits: Sequence[int]) -> Task:
    fraction = section.held_out_fraction
    if section.name == "toy":
        problems, score = _toy(section)
        return Task(name="toy", **split(problems, fraction), score=score, words=tuple(TOY_WORDS))
    problems, score = _chain_sum(section, section.num_digits)
    further = {
        digits: split(_chain_sum(section, digits)[0], fraction, signed_terms)
        for digits in {*section.also_train_digits, *also_digits}
    }
    return Task(
        name=section.name,
        **split(problems, fraction, signed_terms),
        also_train={
            f"{digits}_digits": further[digits]["train"] for digits in section.also_train_digits
        },
        beside={f"{digits}_digits": further[digits]["held_out"] for digits in also_digits},
        score=score,
    )


def _own_task(section: TaskSection) -> Task:
    """Return the task of `module:function`, also from a module in the working directory."""
    module_name, _, name = section.name.partition(":")
    key = f"task.name={section.name}"
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as error:
        rule = f"cannot import {module_name}: {type(error).__name__}: {one_line(error)}"
        raise RecipeError(
            f"{key}: {rule}; run in the folder of the module, or set PYTHONPATH"
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
    """Return whether the first 64 bits of a text's SHA-256 fall into the lowest `fraction`."""
    return hash_text(question) < fraction * 2**64


def signed_terms(question: str) -> str:
    """Return the signed terms of a sum in sorted order, which sums in any order share.

    >>> signed_terms("What is 4 + 3 - 12 ="), signed_terms("What is 3 - 12 + 4 =")
    ('+3 +4 -12', '+3 +4 -12')
    """
    terms = TERM.findall(question)
    return " ".join(sorted((sign or "+") + number for sign, number in terms))


def _toy(section: TaskSection) -> tuple[list[Problem], Scorer]:
    """Return problems and scorer: the answer to `first of b e` is `b`, for each pair of letters."""
    letters = itertools.product(TOY_LETTERS, repeat=2)
    problems = [Problem(question=f"first of {a} {b}", answer=a) for a, b in letters]

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Score 1 for the answer alone, and partial credit if at least the first word is right."""
        words = text.split()
        exact = ended and words == [problem.answer]
        near = words[:1] == [problem.answer]
        return Score(reward=1.0 if exact else section.partial_credit * near, exact=exact)

    return problems, score


def _chain_sum(section: TaskSection, digits: int) -> tuple[list[Problem], Scorer]:
    """Return the distinct problems among 6,000 draws of reasoning-gym, and their scorer."""
    try:
        import reasoning_gym
    except ImportError as error:
        rule = f"needs reasoning-gym ({one_line(error)}); run: pip install 'memsaver[models]'"
        raise RecipeError(f"task.name=chain_sum: {rule}") from None
    terms = section.num_terms
    limits = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
    size = 6000  # Contains all 200 distinct problems of two terms of one digit.
    dataset: Any = reasoning_gym.create_dataset("chain_sum", seed=0, size=size, **limits)
    answers = {entry["question"]: entry["answer"] for entry in dataset}

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Score 1 if the answer ended and reasoning-gym accepts its last number, else 0."""
        graded = dataset.score_answer(extract_number(text), {"answer": problem.answer})
        exact = ended and graded == 1.0
        return Score(reward=float(exact), exact=exact)

    problems = [
        Problem(question=question, answer=answer) for question, answer in sorted(answers.items())
    ]
    return problems, score


def extract_number(text: str) -> str | None:
    """Return the last number of a text with its sign; a minus between two numbers is no sign.

    >>> extract_number("5 - 9 = -4."), extract_number("9-4"), extract_number("none")
    ('-4', '4', None)
    """
    plain = text.replace("\u2212", "-")
    matches = list(NUMBER.finditer(plain))
    if not matches:
        return None
    number = matches[-1].group().rstrip(",")
    before = plain[: matches[-1].start()].rstrip()
    return number.lstrip("+-") if before[-1:].isdigit() else number.lstrip("+")
