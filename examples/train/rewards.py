"""Reward functions of the recipe: each gets the columns of a row that it names."""

import re


def right(completion: str, answer: str, ended: bool) -> float:
    """Return 1 if the last number of the completion is the answer, and the completion ended."""
    numbers = re.findall(r"\d+", completion)
    return float(ended and numbers[-1:] == [answer])


def copied(completion: str, numbers: list[int]) -> float:
    """Return the share of the completion's numbers that the question names."""
    written = re.findall(r"\d+", completion)
    named = [number for number in written if int(number) in numbers]
    return len(named) / len(written) if written else 0.0
