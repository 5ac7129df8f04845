"""A task for models with random weights: the answer's checksum decides, so that groups differ.

memsaver run PLAN task.name=benchmarks.coin_task:coin
"""

import zlib

from recipes.config.sections import ProblemSection
from recipes.tasks import Problem, Score, Task, split

WORDS = "abcdefghijklmnopqrstuvwxyz"


def coin(section: ProblemSection) -> Task:
    """Create the task: 1 for answers with an even checksum, 0 for others."""
    problems = [Problem(prompt=f"say {a} {b}", answer="") for a in WORDS for b in WORDS if a != b]

    def score(problem: Problem, text: str, ended: bool) -> Score:
        even = zlib.crc32(text.encode()) % 2 == 0
        return Score(reward=float(even), correct=even)

    return Task(
        name="coin",
        **split(problems, section.held_out_fraction),
        score=score,
        words=("say", *WORDS),
    )
