"""The endless sequence of prompts, a function of the seed, of which a step takes the next ones.

In the sequence, every set has its share by weight. Each set runs through one permutation of its
problems after another.
"""

import math
import random
from array import array
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from recipes.tasks.problem import Problem, Task

LONGEST = 1_000_000
"""Longest period of a sequence of sets, so weights count to a millionth of their sum."""


def pick_problems(
    tasks: Sequence[Task], count: int, seed: int, drawn: int, apart: int | None = None
) -> list[tuple[Task, Problem]]:
    """Return the next `count` problems of the sequence with their sets.

    After any number of prompts, each set has had its share by weight, to within one prompt. A
    problem returns only after all problems of its set have been taken.

    Args:
        tasks: The sets.
        count: Number of problems.
        seed: Seed of the sequence.
        drawn: Number of problems that come before in the sequence.
        apart: Problems in a row that are distinct, at most as many as the sets can provide. The
            sequence depends on it. None: `count`.
    """
    shares = shares_of(tuple(task.weight for task in tasks))
    picked: list[tuple[Task, Problem]] = []
    for index, position in shares.between(drawn, drawn + count):
        problems = tasks[index].train
        turn, place = divmod(position, len(problems))
        most = shares.most(index, apart or count)
        order = _permutation(len(problems), most, f"{seed}/prompts/{index}", turn)
        picked.append((tasks[index], problems[order[place]]))
    return picked


class Shares:
    """Sequence of set numbers in which each set has its share by weight, to within one prompt.

    The shares of a sequence of length n are n times the weights over their sum. Prompt j of a set
    is due between the moments when its share reaches j - 1 and j; the prompt that is due first is
    next. For one processor and rates of sum 1, this order meets all dates
    (Liu and Layland, "Scheduling algorithms for multiprogramming", 1973). The sequence repeats
    after `period` prompts.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(exact := [Fraction(str(weight)) for weight in weights])
        shares = [weight / total for weight in exact]
        scale = math.lcm(*(share.denominator for share in shares))
        self.rates = [max(1, round(share * min(scale, LONGEST))) for share in shares]
        self.period = sum(self.rates)
        self._sequence = bytearray()
        self._counts = [0] * len(weights)  # prompts of each set in `_sequence`

    def between(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the prompts `begin` to `end` - 1, each as a set and its position in the set."""
        cycles, first = divmod(begin, self.period)
        self._extend(min(self.period, first + end - begin))
        counts = [
            cycles * rate + self._sequence.count(index, 0, first)
            for index, rate in enumerate(self.rates)
        ]
        picked = []
        for number in range(begin, end):
            index = self._sequence[number % self.period]
            picked.append((index, counts[index]))
            counts[index] += 1
        return picked

    def most(self, index: int, count: int) -> int:
        """Return a bound on the prompts of a set among `count` prompts in a row."""
        share = -(-count * self.rates[index] // self.period)
        return share if count % self.period == 0 else min(count, share + 1)

    def _extend(self, length: int) -> None:
        """Compute the first `length` prompts of the sequence, unless they are there."""
        for number in range(len(self._sequence), length):
            due = [
                (-(-(count + 1) * self.period // rate), index)
                for index, (count, rate) in enumerate(zip(self._counts, self.rates, strict=True))
                if count * self.period <= number * rate  # its share has reached `count`
            ]
            index = min(due)[1]
            self._counts[index] += 1
            self._sequence.append(index)


shares_of = lru_cache(maxsize=4)(Shares)


@lru_cache(maxsize=512)  # two passes of each of 256 sets, the most that a recipe can have
def _permutation(size: int, apart: int, seed: str, turn: int) -> Sequence[int]:
    """Return the permutation of one pass, a function of its arguments.

    Passes shuffle within blocks that are the same for all passes. So an index returns after
    `apart` places at the earliest.
    """
    order = list(range(size))
    random.Random(seed).shuffle(order)
    block = max(1, size - apart + 1)
    parts = [order[start : start + block] for start in range(0, size, block)]
    for part in parts:
        random.Random(f"{seed}/{turn}/{part[0]}").shuffle(part)
    return array("I", chain.from_iterable(parts))
