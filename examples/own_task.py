"""A task of one's own for `memsaver run`: name the larger of two letters.

    memsaver run examples/own_task.yaml

The recipe says `task.name: examples.own_task:larger`; the folder that the command is run from is
searched, too.
"""

from __future__ import annotations

from itertools import permutations

from recipes.config.models import TaskSection
from recipes.tasks import Problem, Score, Task, split

LETTERS = "abcdefgh"


def larger(section: TaskSection) -> Task:
    """`larger of c f` is answered `f`, for every pair of different letters."""
    problems = [
        Problem(question=f"larger of {a} {b}", answer=max(a, b))
        for a, b in permutations(LETTERS, 2)
    ]

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Exact: the answer, alone, and the end.

        The right letter with something after it is a near miss.
        """
        words = text.split()
        exact = ended and words == [problem.answer]
        near = words[:1] == [problem.answer]
        return Score(reward=1.0 if exact else section.partial_credit * near, exact=exact)

    return Task(
        name="larger",
        **split(problems, section.held_out_fraction),
        score=score,
        # for a random model's tokenizer; a real model's task leaves it away
        words=("larger", "of", *LETTERS),
    )
