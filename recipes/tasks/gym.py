"""Generators of reasoning-gym as tasks: problems without a download."""

import dataclasses
import difflib
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from recipes.config.literals import Extract
from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError, one_line, shown
from recipes.rewards.extract import extract
from recipes.tasks.draws import draw_reproducibly
from recipes.tasks.problem import Problem, Score, Task
from recipes.tasks.split import split

PREFIX = "reasoning_gym:"
SIZE = 6000
"""Draws of a generator by default: they contain all 200 sums of two terms of one digit."""
TERM = re.compile(r"([-+]?) ?(\d+)")


def reasoning_gym(section: ProblemSection, place: str) -> Task:
    """Return the distinct problems among a generator's draws, scored by the generator.

    `section.parameters` are the generator's; size (default 6000) and seed (default 0) among them.

    Raises:
        RecipeError: reasoning-gym is missing, has no such generator, or refuses the parameters of
            the key `place`.
    """
    name = section.name.removeprefix(PREFIX)
    options = {"seed": 0, "size": SIZE, **section.parameters}
    dataset = _dataset(section, name, options, place)
    try:
        drawn = draw_reproducibly(name, options, f"{place}.parameters.size={dataset.size}")
    except Exception as error:  # A parameter of a wrong type fails only here.
        raise _refused(section, place, error) from error

    distinct = {entry["question"]: _problem(entry) for entry in drawn}
    sides = split([*distinct.values()], section.held_out_fraction, SAME.get(name, str))
    return Task(name=name, **sides, score=GeneratorScorer(name, options, section.extract))


@dataclasses.dataclass(frozen=True)
class GeneratorScorer:
    """The scorer of a generator, which may evaluate the answer, so workers call it.

    Args:
        name: Name of the generator.
        options: Its parameters.
        extract: Part of an answer that it scores.
    """

    name: str
    options: dict[str, Any]
    extract: Extract
    evaluates = True
    memory = 2**31

    def __call__(self, problem: Problem, text: str, ended: bool) -> Score:
        """Return the generator's score of the extracted answer; 0 if the answer was cut off."""
        answer = extract(self.extract, text) if ended else None
        entry = {"question": problem.prompt, "answer": problem.answer, **problem.columns}
        reward = 0.0 if answer is None else float(self._dataset.score_answer(answer, entry))
        return Score(reward=reward, correct=reward == 1.0)

    @cached_property
    def _dataset(self) -> Any:
        from reasoning_gym.factory import create_dataset

        return create_dataset(self.name, **self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.name, self.options, self.extract)


def _loaded(name: str, options: dict[str, Any], extract: Extract) -> GeneratorScorer:
    """Return a scorer that has built its generator, which no call should pay for."""
    scorer = GeneratorScorer(name, options, extract)
    _ = scorer._dataset
    return scorer


def _problem(entry: dict[str, Any]) -> Problem:
    """Return the problem of an entry; generators that accept several answers may name none."""
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return Problem(prompt=entry["question"], answer=answer, columns={"metadata": entry["metadata"]})


def _dataset(section: ProblemSection, name: str, options: dict[str, Any], place: str) -> Any:
    """Return the generator with its parameters."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        rule = f"needs reasoning-gym ({one_line(error)}); run: pip install 'memsaver[data]'"
        raise RecipeError(f"{place}.name={section.name}: {rule}") from None
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1) or ["chain_sum"]
        rule = f"reasoning-gym has no generator {name}; set {place}.name={PREFIX}{close[0]}"
        raise RecipeError(f"{place}.name={section.name}: {rule}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if unknown := [option for option in options if option not in known]:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        value = shown(options[unknown[0]])
        rule = f"{name} has no such parameter; {hint}"
        raise RecipeError(f"{place}.parameters.{unknown[0]}={value}: {rule}")
    try:
        return create_dataset(name, **options)
    except Exception as error:  # Most generators check their parameters with `assert`.
        raise _refused(section, place, error) from error


def _refused(section: ProblemSection, place: str, error: Exception) -> RecipeError:
    parameters, name = shown(section.parameters), section.name.removeprefix(PREFIX)
    rule = f"{name} refuses them: {type(error).__name__}: {shown(one_line(error))}; correct them"
    return RecipeError(f"{place}.parameters={parameters}: {rule}")


def signed_terms(question: str) -> str:
    """Return the signed terms of a sum in sorted order, which sums in any order share.

    >>> signed_terms("What is 4 + 3 - 12 ="), signed_terms("What is 3 - 12 + 4 =")
    ('+3 +4 -12', '+3 +4 -12')
    """
    terms = TERM.findall(question)
    return " ".join(sorted((sign or "+") + number for sign, number in terms))


SAME: dict[str, Callable[[str], str]] = {"chain_sum": signed_terms}
"""By generator, the function whose value equivalent problems share (`split`)."""
