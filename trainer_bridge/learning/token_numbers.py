"""Numbers of the tokens of some answers, as lists by answer and as one array, in fp64."""

import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
"""Numbers of all tokens, answer by answer."""

PerToken = list[list[float]]
"""A number for each token of each answer."""


def flat(rows: PerToken) -> Numbers:
    """Return the numbers of all tokens in one array, answer by answer."""
    packed, at = bytearray(8 * sum(map(len, rows))), 0
    for row in rows:  # A third of the time of np.array(row).
        struct.pack_into(f"{len(row)}d", packed, at, *row)
        at += 8 * len(row)
    return np.frombuffer(packed)


def by_answer(numbers: Numbers, lengths: Sequence[int]) -> PerToken:
    """Return the numbers of each answer, given the answers' tokens; the inverse of `flat`."""
    ends = zip(lengths, accumulate(lengths), strict=True)
    return [numbers[end - length : end].tolist() for length, end in ends]


def log_ratios(first: PerToken, second: PerToken) -> Numbers:
    """Return second - first for every token.

    Raises:
        ValueError: The two differ in the tokens of an answer.
    """
    lengths = [list(map(len, rows)) for rows in (first, second)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"log-probabilities of {lengths[0]} and of {lengths[1]} tokens")
    ratios = flat(second)
    ratios -= flat(first)
    return ratios


def unequal_places(first: Sequence[float], second: Sequence[float]) -> list[int]:
    """Return where two lists of log-probabilities differ in fp32."""
    ours, theirs = (np.asarray(values, np.float32) for values in (first, second))
    return np.flatnonzero(ours != theirs).tolist()
