"""Records of a reward: the sampled answer, what each function says of it, and their sum."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from recipes.errors import shown

LARGEST_REWARD = 3e38  # The trainer takes advantages in fp32.


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to score.

    Attributes:
        prompt: The user's turn as text, or the messages of a chat.
        text: The answer's text, without the end token.
        answer: Expected answer.
        ended: Whether the answer ended by the end token instead of being cut off.
        columns: Further columns of the problem by name.
        token_ids: Tokens of the answer.
        set: Name of the problem's set, if `Rewards` has several.
        rendered_prompt: The prompt as the chat template writes it.
        problem: The problem (`recipes.tasks.Problem`), which scorers of tasks get.
        earned: Of a conversation, what the environment says (""), and what reward functions that
            take the environment say, by name.
    """

    prompt: Any
    text: str
    answer: Any = ""
    ended: bool = True
    columns: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    set: str = ""
    rendered_prompt: str = ""
    problem: Any = None
    earned: "Mapping[str, Score]" = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one reward function, or the scorer of a task, says of an answer.

    A scorer may use Python or numpy numbers, bools, or tensors of one element.

    Attributes:
        reward: Its reward; None: the function does not apply to the answer, or failed.
        correct: Whether the answer is correct; None: the function does not say.
        figures: Further figures of the answer by name.
        fault: What failed, on one line; empty if nothing did.
        judges: Whether the function compares the answer with the expected answer.
        renamed: Whether the function said `exact` in place of `correct`.
    """

    reward: float | None = None
    correct: bool | None = None
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    fault: str = ""
    judges: bool = False
    renamed: bool = False
    exact: InitVar[Any] = None

    def __post_init__(self, exact: Any) -> None:
        if exact is not None:
            object.__setattr__(self, "correct", exact)
            object.__setattr__(self, "renamed", True)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """An answer with its reward: the one record from the sampled answer to the loss.

    Attributes:
        answer: The answer.
        reward: Reward that training uses; None leaves the answer out of its group.
        correct: Whether the answer counts as correct in the figures; never without a reward.
        figures: Further figures by name, such as the value of each reward function.
        fault: Why there is no reward, on one line; empty if there is one, or if none was meant.
        raw_reward: Weighted sum of the functions' rewards, before any shaping.
    """

    answer: Answer
    reward: float | None
    correct: bool = False
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    fault: str = ""
    raw_reward: float | None = None

    def __post_init__(self) -> None:
        if self.reward is None:
            object.__setattr__(self, "correct", False)
        elif self.raw_reward is None:
            object.__setattr__(self, "raw_reward", self.reward)


def score_of(result: Any, judges: bool = False) -> Score:
    """Convert the result of a reward function: a number, a mapping, a Score, or None.

    Raises:
        ValueError: The result has another type, or its reward is not finite in fp32.
    """
    if result is None:
        return Score()
    if hasattr(result, "reward") and not isinstance(result, Mapping):
        correct = "exact" if getattr(result, "renamed", False) else "correct"
        said = {"reward": result.reward, correct: getattr(result, "correct", None)}
        result = {**getattr(result, "figures", {}), **said}
    if not isinstance(result, Mapping):
        return Score(reward=as_reward(result), judges=judges)
    figures = dict(result)
    key = "reward" if "reward" in figures else "score"
    if key not in figures:
        raise ValueError(f"a mapping without reward: {shown(repr(figures), 60)}")
    renamed = "exact" in figures and "correct" not in figures
    reward, correct = figures.pop(key), figures.pop("exact" if renamed else "correct", None)
    scalars = {str(name): _scalar(value) for name, value in figures.items()}
    return Score(
        reward=None if reward is None else as_reward(reward),
        correct=None if correct is None else _as_bool(correct),
        figures={name: float(value) for name, value in scalars.items() if _is_finite(value)},
        judges=judges,
        renamed=renamed,
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
    raise ValueError(f"correct={shown(repr(value), 40)}, neither true nor false")


def _is_finite(scalar: Any) -> bool:
    return isinstance(scalar, int | float) and abs(scalar) <= LARGEST_REWARD


def _scalar(value: Any) -> Any:
    """Return the only element of a tensor or a numpy array; anything else unchanged."""
    if isinstance(value, int | float):
        return value
    with contextlib.suppress(ValueError, RuntimeError, TypeError):  # more than one element
        return value.item() if hasattr(value, "item") else value
    return value
