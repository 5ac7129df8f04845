"""Reward functions of every convention, and one for each way to misbehave."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def plain(completion: str, answer: str) -> float:
    return float(completion == answer)


def of_all(**columns: Any) -> float:
    return float(columns["completion"] == columns["answer"])


class WithAttributes(dict[str, Any]):
    """A mapping whose keys are attributes, too, as results of several libraries are."""

    __getattr__ = dict.__getitem__


def mapping(completion: str, answer: str, ended: bool) -> WithAttributes:
    length = len(completion)
    return WithAttributes(reward=completion == answer, exact=ended, length=length, note="x")


def scored(completion: str, answer: str) -> dict[str, Any]:
    """Return a mapping as verl's reward functions do."""
    return {"score": np.float32(completion == answer), "pred": completion}


def batched(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str]) -> list[Any]:
    assert len(prompts) == len(completions)
    return [np.bool_(text == right) for text, right in zip(completions, answer, strict=True)]


async def awaited(completion: str, answer: str) -> float:
    await asyncio.sleep(0.001)
    return float(completion == answer)


async def awaited_batch(completions: Sequence[str], answer: Sequence[str]) -> Any:
    await asyncio.sleep(0.001)
    return np.array(completions) == np.array(answer)


class Judge:
    """A callable that loads something once in each process."""

    def __init__(self, right: float = 1.0) -> None:
        self.right = right

    def __call__(self, completion: str, answer: str) -> float:
        return self.right * (completion == answer)


class AwaitedJudge(Judge):
    """A callable that is awaited."""

    async def __call__(self, completion: str, answer: str) -> float:  # type: ignore[override]
        return super().__call__(completion, answer)


judge = Judge()
half = functools.partial(Judge(), answer="5")


def chat_length(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return lengths as a reward function of TRL does for chats."""
    assert columns["prompts"][0][0]["role"] == "user"
    return [float(len(chat[0]["content"])) for chat in completions]


def some(completions: Sequence[str], kind: Sequence[str | None]) -> list[float | None]:
    return [float(len(name)) if name else None for name in kind]


def nothing(**columns: Any) -> None:
    return None


def kept(completion: str) -> float:
    return len(completion) / 100


def by_place(completions: Sequence[str]) -> list[float]:
    """Return the place of each answer, so that no group can lose its signal."""
    return [float(place) for place, _ in enumerate(completions)]


def imported(completion: str) -> dict[str, Any]:
    """Return whether this process has imported torch, and its id."""
    torch = any(name.partition(".")[0] == "torch" for name in sys.modules)
    return {"reward": float(torch), "process": os.getpid()}


def unknown_parameter(completion_text: str) -> float:
    return 1.0


def in_a_child(number: int, marker: str) -> float:
    if number == 5:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)", marker])
    return 1.0


def slow(completion: str, number: int) -> float:
    time.sleep(0.04)
    return float(number)


def hang(completion: str) -> float:
    time.sleep(1000)
    return 1.0


def leaves_a_child(completion: str) -> float:
    """Leave a process that holds all files of this one and is in no group with it."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(4)
        os._exit(0)
    return hang(completion)


class Odd(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _misbehaving(wrong: Callable[[], Any]) -> Callable[..., Any]:
    def function(completion: str, number: int) -> Any:
        return wrong() if number == 5 else 1.0

    return function


def _raise(error: BaseException) -> Any:
    raise error


raises = _misbehaving(lambda: json.loads("{"))
raises_odd = _misbehaving(lambda: _raise(Odd()))
exits = _misbehaving(lambda: sys.exit("bye"))
cancels = _misbehaving(lambda: _raise(asyncio.CancelledError()))
interrupts = _misbehaving(lambda: _raise(KeyboardInterrupt()))
hangs_in_c = _misbehaving(lambda: re.match(r"(a+)+$", "a" * 64 + "b"))
dies = _misbehaving(lambda: os._exit(7))
dies_without_error = _misbehaving(lambda: os._exit(0))
crashes = _misbehaving(lambda: ctypes.string_at(0))
returns_nan = _misbehaving(lambda: float("nan"))
returns_huge = _misbehaving(lambda: 10**400)
returns_text = _misbehaving(lambda: "1.0")
returns_two = _misbehaving(lambda: np.ones(2))
returns_no_reward = _misbehaving(lambda: {"length": 3})
returns_half_correct = _misbehaving(lambda: {"reward": 1.0, "correct": 0.5})
sends_what_nobody_can_load = _misbehaving(lambda: {"reward": 1.0, "exact": lambda: None})


def short_batch(completions: Sequence[str], number: Sequence[int]) -> list[float]:
    return [1.0 for index in number if index != 5]


def batch_raises(completions: Sequence[str], number: Sequence[int]) -> list[float]:
    if 5 in number:
        raise KeyError("five")
    return [1.0] * len(completions)


def batch_hangs(completions: Sequence[str], number: Sequence[int]) -> list[float]:
    if 5 in number:
        time.sleep(1000)
    return [1.0] * len(completions)


def batch_has_nan(completions: Sequence[str], number: Sequence[int]) -> Any:
    return np.where(np.array(number) == 5, np.nan, 1.0)


async def awaited_hangs(completion: str, number: int) -> float:
    await asyncio.sleep(1000 if number == 5 else 0)
    return 1.0


async def awaited_blocks(completion: str, number: int) -> float:
    if number == 5:
        time.sleep(1000)
    return 1.0


async def awaited_raises(completion: str, number: int) -> float:
    await asyncio.sleep(0)
    return 1.0 / (number != 5)


FAULTS = {
    "raises": r"raised JSONDecodeError: .* \(tests/helpers/recipes/reward_functions.py:\d+\)",
    "raises_odd": r"raised Odd",
    "exits": r"raised SystemExit: bye \(.*:\d+\)",
    "cancels": "raised CancelledError",
    "hangs_in_c": r"took longer than 1 s",
    "dies": r"ended its process: exit status 7",
    "dies_without_error": r"ended its process: exit status 0",
    "crashes": r"ended its process: SIGSEGV",
    "returns_nan": r"returned a reward of nan, not finite in fp32",
    "returns_huge": r"returned a reward of 1000.*, not finite in fp32",
    "returns_text": r"returned a reward of type str: '1.0'",
    "returns_two": r"returned a reward of type ndarray: ",
    "returns_no_reward": r"returned a mapping without reward: {'length': 3}",
    "returns_half_correct": r"returned correct=0.5, neither true nor false",
    "sends_what_nobody_can_load": r"returned correct=<function .*, neither true nor false",
    "short_batch": r"returned 7 rewards for 8 answers",
    "batch_hangs": r"took longer than 1 s",
    "batch_raises": r"raised KeyError: 'five' \(.*reward_functions.py:\d+\)",
    "batch_has_nan": r"returned a reward of nan",
    "awaited_hangs": r"took longer than 1 s",
    "awaited_blocks": r"took longer than 1 s",
    "awaited_raises": r"raised ZeroDivisionError: .* \(.*reward_functions.py:\d+\)",
}
"""What the score of answer 5 says, by the function that scores it."""
