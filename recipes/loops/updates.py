"""Updates of a step: which answers each of them takes, and their mean figures."""

import random
import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter

from trainer_bridge import SequenceBatch


def mini_batches(count: int, epochs: int, number: int, seed: int, step: int) -> list[list[int]]:
    """Return the answers of each update: a pass shuffles `count` answers into `number` parts.

    If there are fewer answers than parts, there are as many parts as answers. A single part needs
    no shuffle.
    """
    parts: list[list[int]] = []
    number = min(count, number)
    for epoch in range(epochs):
        order = list(range(count))
        if number > 1:
            random.Random(f"{seed}/mini_batches/{step}/{epoch}").shuffle(order)
        parts += [
            order[count * part // number : count * (part + 1) // number] for part in range(number)
        ]
    return parts


def update(
    learn: Callable[[SequenceBatch], dict[str, float]],
    batch: SequenceBatch,
    parts: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Run one optimizer step on each part and return the means of their figures.

    Without parts there is no update, and no figure.
    """
    figures = [learn(batch.of_answers(part)) for part in parts]
    return {
        name: statistics.fmean(map(itemgetter(name), figures)) for name in next(iter(figures), {})
    }
