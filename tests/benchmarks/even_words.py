"""A task for random models of a whole vocabulary: answers of words with even numbers.

    memsaver run qwen2.5-7b-fp32 task.name=tests.benchmarks.even_words:even_words

At a temperature so low that few tokens are likely, half of them score at first, and a policy that
learns comes to prefer these within some updates.
"""

from __future__ import annotations

from itertools import pairwise

from recipes.config import TaskSection
from recipes.tasks import Problem, Score, Task

WORDS = 150_000  # nearly all of Qwen2.5's vocabulary, so that nearly every token is a word
QUESTIONS = 16


def even_words(section: TaskSection) -> Task:
    """The reward is the share of an answer's words whose number is even; none score 0."""

    def score(problem: Problem, text: str, ended: bool) -> Score:
        numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        share = sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))
        return Score(reward=share, exact=share == 1)

    names = [f"w{number}" for number in range(WORDS)]
    train = [Problem(question=f"{a} {b}", answer=names[0]) for a, b in pairwise(names)]
    return Task(
        name="even_words",
        train=tuple(train[:QUESTIONS]),
        held_out=tuple(train[QUESTIONS : 2 * QUESTIONS]),
        score=score,
        words=tuple(names),
    )
