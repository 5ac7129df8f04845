"""The task `toy`, which a random model of 75 k parameters learns in a minute."""

import itertools

from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError, shown
from recipes.tasks.problem import Problem, Score, Task
from recipes.tasks.split import split

TOY_LETTERS = "abcdefgh"
TOY_WORDS = ["first", "of", *TOY_LETTERS]


def toy(section: ProblemSection, place: str) -> Task:
    """Return the task whose answer to `first of b e` is `b`, for each pair of letters.

    Its parameter `partial_credit` is the reward of an answer of which only the first word is right.

    Raises:
        RecipeError: The section of the key `place` has another parameter, or no number below 1.
    """
    parameters = {"partial_credit": 0.0, **section.parameters}
    partial_credit = parameters["partial_credit"]
    if len(parameters) > 1 or not isinstance(partial_credit, int | float) or partial_credit >= 1:
        rule = "toy takes only partial_credit, a number below 1"
        remedy = f"set {place}.parameters.partial_credit=0.5, or drop them"
        raise RecipeError(f"{place}.parameters={shown(section.parameters)}: {rule}; {remedy}")
    letters = itertools.product(TOY_LETTERS, repeat=2)
    problems = [Problem(prompt=f"first of {a} {b}", answer=a) for a, b in letters]

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Score 1 for the answer alone, and partial credit if at least the first word is right."""
        words = text.split()
        correct = ended and words == [problem.answer]
        near = words[:1] == [problem.answer]
        return Score(reward=1.0 if correct else partial_credit * near, correct=correct)

    sides = split(problems, section.held_out_fraction)
    return Task(name="toy", **sides, score=score, words=tuple(TOY_WORDS))
