"""Scores of answers, and the conversion of what reward functions return."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipes.errors import shown

LARGEST_REWARD = 3e38  # The trainer takes advantages in fp32.


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one answer.

    A scorer may use Python or numpy numbers, bools, or tensors of one element.

    Attributes:
        reward: Reward that training uses; None leaves the answer out of its group.
        exact: Whether the answer counts as an exact match in the figures; never without a reward.
        figures: Further figures of the answer by name, such as the value of each reward function.
        fault: Why there is no reward, on one line; empty if there is one, or if none was meant.
    """

    reward: float | None
    exact: bool = False
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    fault: str = ""

    def __post_init__(self) -> None:
        if self.reward is None:
            object.__setattr__(self, "exact", False)


class Outcome(NamedTuple):
    """Result of one reward function for one answer.

    Attributes:
        value: Reward; None if the function does not apply, or failed.
        exact: Whether the answer is an exact match; None if the function does not say.
        figures: Further figures by name.
        fault: What failed; empty if nothing did.
    """

    value: float | None = None
    exact: bool | None = None
    figures: Mapping[str, float] | None = None
    fault: str = ""


def outcome_of(result: Any) -> Outcome:
    """Convert the result of a reward function: a number, a mapping, a Score, or None.

    Raises:
        ValueError: The result has another type, or its reward is not finite in fp32.
    """
    if result is None:
        return Outcome()
    if isinstance(result, Mapping):
        key = "reward" if "reward" in result else "score"
        if key not in result:
            raise ValueError(f"a mapping without reward: {shown(repr(dict(result)), 60)}")
        rest = {name: value for name, value in result.items() if name not in (key, "exact")}
        return _outcome(result[key], result.get("exact"), rest)
    if hasattr(result, "reward"):
        return _outcome(result.reward, result.exact, getattr(result, "figures", {}))
    return Outcome(as_reward(result))


def _outcome(reward: Any, exact: Any, figures: Mapping[str, Any]) -> Outcome:
    scalars = {str(name): _scalar(value) for name, value in figures.items()}
    return Outcome(
        None if reward is None else as_reward(reward),
        None if exact is None else _as_bool(exact),
        {name: float(value) for name, value in scalars.items() if _is_finite(value)},
    )


def as_reward(value: Any) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: The value is no number, or not finite in fp32.
    """
    scalar = _scalar(value)
    if not isinstance(scalar, int | float):
        raise ValueError(f"a reward of type {type(value).__name__}: {shown(repr(value), 40)}")
    if not _is_finite(scalar):
        raise ValueError(f"a reward of {shown(scalar, 40)}, not finite in fp32")
    return float(scalar)


def _as_bool(value: Any) -> bool:
    scalar = _scalar(value)
    if isinstance(scalar, int | float) and scalar in (0, 1):
        return bool(scalar)
    raise ValueError(f"exact={shown(repr(value), 40)}, neither true nor false")


def _is_finite(scalar: Any) -> bool:
    return isinstance(scalar, int | float) and abs(scalar) <= LARGEST_REWARD


def _scalar(value: Any) -> Any:
    """Return the only element of a tensor or a numpy array; anything else unchanged."""
    if isinstance(value, int | float):
        return value
    with contextlib.suppress(ValueError, RuntimeError, TypeError):  # more than one element
        return value.item() if hasattr(value, "item") else value
    return value
