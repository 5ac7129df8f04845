"""Split of problems into a training and an evaluation side.

A hash decides whether a problem is held out: of its text, or of a text that equivalent problems
share (a sum in any order of its terms). The split depends on nothing else, so no seed, step or
resume can bring a held-out problem into training.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypedDict

from recipes.tasks.problem import Problem


class Sides(TypedDict):
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def split(problems: Sequence[Problem], fraction: float, same: Callable[[str], str] = str) -> Sides:
    """Divide problems into `train` and `held_out` by a hash of their texts.

    Args:
        problems: All problems of a set; their order does not matter.
        fraction: Approximate share to hold out.
        same: Maps a text to a text that equivalent problems share. They land on the same side,
            because a model that has learned one can answer the other.

    Returns:
        The sides; held-out problems are in the order of their hashes.
    """
    sides: dict[bool, list[Problem]] = {False: [], True: []}
    for problem in problems:
        sides[is_held_out(same(problem.text), fraction)].append(problem)
    shuffled = sorted(sides[True], key=lambda problem: hash_text(problem.text))
    return {"train": tuple(sides[False]), "held_out": tuple(shuffled)}


def hash_text(text: str) -> int:
    """Return the first 64 bits of the text's SHA-256, as `memsaver.ops.hash` does.

    Importing that module would import torch in each worker that needs `recipes.tasks`.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether the first 64 bits of a text's SHA-256 fall into the lowest `fraction`."""
    return hash_text(text) < fraction * 2**64
