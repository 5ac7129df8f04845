"""Figures of a step, for metrics.jsonl."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipes.loops.numbers import deviation
from recipes.loops.sampling import Samples
from recipes.rewards import Scored
from recipes.tasks import Task


def answer_figures(
    samples: Samples, scores: Sequence[Scored], seconds: float, tasks: Sequence[Task]
) -> dict[str, Any]:
    """Return the figures of all answers of a step, for metrics.jsonl.

    Args:
        samples: The answers.
        scores: Record of each answer; at least one has a reward.
        seconds: Seconds in which they were sampled.
        tasks: Sets to train on; if there are several, the row has figures of each.

    Returns:
        Figures by name, as in docs/loops.md.
    """
    lengths = samples.lengths
    row: dict[str, Any] = {
        **_of_scores(scores),
        **unrewarded(scores),
        "response_length": sum(lengths) / len(lengths),
        "response_length_min": min(lengths),
        "response_length_max": max(lengths),
        "cut_off": samples.ended.count(False) / len(lengths),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / max(seconds, 1e-9),
    }
    row |= _of_conversations(samples)
    if functions := by_function(scores):
        row["rewards"] = functions
    if len(tasks) > 1:
        row["sets"] = _by_set(samples, scores, tasks)
    return row


def _of_conversations(samples: Samples) -> dict[str, float]:
    """Return figures of conversations with environments; none without any."""
    if not (talks := samples.conversations):
        return {}
    return {
        "turns": float(np.mean([talk.turns for talk in talks])),
        "tool_calls": sum(talk.calls for talk in talks),
        "tool_errors": sum(talk.errors for talk in talks),
        "forks": sum(len(talk.rows) - 1 for talk in talks),
        "recomputed_tokens": sum(talk.recomputed for talk in talks),
        "environment_seconds": float(np.mean([talk.seconds for talk in talks])),
        "device_waited_seconds": sum(talk.device_waited for talk in talks),
    }


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which correct answers are called so, in the figures of each set, too.

    Rows of before, and loops of other code, may call them exact.
    """
    row = {re.sub("^exact(_match)?(?=_|$)", "correct", name): row[name] for name in row}
    if isinstance(row.get("sets"), dict):
        row["sets"] = {name: renamed(figures) for name, figures in row["sets"].items()}
    return row


def _of_scores(scores: Sequence[Scored]) -> dict[str, float]:
    """Return rewards, if an answer has one, and the share of correct answers."""
    rewards = [score.reward for score in scores if score.reward is not None]
    figures = {"correct": sum(score.correct for score in scores) / len(scores)}
    if rewards:
        figures |= {"reward": float(np.mean(rewards)), "reward_std": deviation(rewards)}
    return figures


def unrewarded(scores: Sequence[Scored]) -> dict[str, int]:
    """Return the numbers of answers without a reward, and of those whose function failed."""
    return {
        "unscored": sum(score.reward is None for score in scores),
        "faults": sum(bool(score.fault) for score in scores),
    }


def by_function(scores: Sequence[Scored]) -> dict[str, dict[str, float]]:
    """Return mean and deviation of each reward function over the answers for which it has one."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.figures.items():
            values.setdefault(name, []).append(value)
    return {
        name: {"mean": float(np.mean(numbers)), "std": deviation(numbers)}
        for name, numbers in values.items()
    }


def _by_set(
    samples: Samples, scores: Sequence[Scored], tasks: Sequence[Task]
) -> dict[str, dict[str, float]]:
    sets: dict[str, list[Scored]] = {task.name: [] for task in tasks}
    for task, score in zip(samples.tasks, scores, strict=True):
        sets[task.name].append(score)
    return {name: {"answers": len(part), **_of_scores(part)} for name, part in sets.items() if part}
