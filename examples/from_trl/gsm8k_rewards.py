"""Reward functions in TRL's form, which TRL and memsaver call alike."""

import re


def right(completions: list, answer: list[str], **columns: object) -> list[float]:
    """Return 1 for each completion whose last number is that of the solution in the data."""
    return [
        float(last_number(text_of(completion)) == last_number(solution))
        for completion, solution in zip(completions, answer, strict=True)
    ]


def brief(completions: list, **columns: object) -> list[float]:
    """Return 1 for each completion of at most 1,000 characters."""
    return [float(len(text_of(completion)) <= 1000) for completion in completions]


def text_of(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, which is a list of messages if the prompt is one."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def last_number(text: str) -> float | None:
    """Return the last number of a text, or None."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
