"""The task `guess` of several turns, which a random model learns on a CPU."""

import itertools

from recipes.config.sections import ProblemSection
from recipes.environments import Guess
from recipes.errors import RecipeError, shown
from recipes.tasks.problem import Problem, Score, Task
from recipes.tasks.split import split

LARGEST = 8
"""Largest number to guess, by default."""
GAMES = "abcdefghijklmnop"
"""Words of prompts that say nothing of the number."""
WORDS = ["guess", "game", "higher", "lower", "up", "to", *GAMES]


def guess(section: ProblemSection, place: str) -> Task:
    """Return the task to find a number up to `largest` (8) in few guesses.

    Raises:
        RecipeError: The section of the key `place` has another parameter, or no number above 1.
    """
    parameters = {"largest": LARGEST, **section.parameters}
    largest = parameters["largest"]
    if len(parameters) > 1 or not isinstance(largest, int) or largest < 2:
        rule = "guess takes only largest, a number above 1"
        remedy = f"set {place}.parameters.largest={LARGEST}, or drop them"
        raise RecipeError(f"{place}.parameters={shown(section.parameters)}: {rule}; {remedy}")
    numbers, column = range(1, largest + 1), {"largest": largest}
    problems = [
        Problem(prompt=f"guess up to {largest} game {game}", columns={"number": number, **column})
        for game, number in itertools.product(GAMES, numbers)
    ]

    def score(problem: Problem, text: str, ended: bool) -> Score:
        return Score()  # the environment gives the reward

    return Task(
        name="guess",
        **split(problems, section.held_out_fraction),
        score=score,
        words=(*WORDS, *map(str, numbers)),
        environments={"": f"{Guess.__module__}:{Guess.__name__}"},
    )
