"""A custom task for `memsaver run`: name the larger of two letters.

    memsaver run examples/own_task.yaml
    python examples/own_task.py [ANSWER]

The recipe names the task by `task.name: examples.own_task:larger`. `memsaver run` also searches the
working directory for the module. The second command scores an answer without a run.
"""

from __future__ import annotations

import argparse
from itertools import permutations

from recipes.config.sections import ProblemSection
from recipes.tasks import Problem, Score, Task, split

LETTERS = "abcdefgh"


def larger(section: ProblemSection) -> Task:
    """Create the task: the answer to `larger of c f` is `f`, for all pairs of different letters."""
    problems = [
        Problem(prompt=f"larger of {a} {b}", answer=max(a, b)) for a, b in permutations(LETTERS, 2)
    ]

    partial_credit = float(section.parameters.get("partial_credit", 0.0))

    def score(problem: Problem, text: str, ended: bool) -> Score:
        """Score an answer: 1 for the right letter alone, partial credit if it comes first."""
        words = text.split()
        correct = ended and words == [problem.answer]
        near = words[:1] == [problem.answer]
        return Score(reward=1.0 if correct else partial_credit * near, correct=correct)

    return Task(
        name="larger",
        **split(problems, section.held_out_fraction),
        score=score,
        # for the tokenizer of a random model; a task for a real model omits it
        words=("larger", "of", *LETTERS),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show a problem of the task, and score an answer.")
    parser.add_argument("answer", nargs="?", help="default: the right answer")
    task = larger(ProblemSection(name="examples.own_task:larger"))
    problem = task.train[0]
    answer = parser.parse_args().answer or problem.answer
    print(f"{len(task.train)} problems, such as: {problem.prompt}")
    print(f"{answer}: {task.score(problem, answer, True)}")
