"""Conversations as token ids: what was sampled stays, and what is between is masked."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recipes.environments import EnvironmentFault, EnvironmentKind
from recipes.loops.conversation import Talk
from recipes.rewards import Score
from rollout import Completion

STOP, TOOL = 1, 2
"""Tokens with which scripted answers end, and with which they call a tool."""


class ScriptedFormat:
    """Replies have as many tokens as characters, each 90."""

    def begin(self, problem: Any, observation: str) -> array[int]:
        return array("i", [*problem.prompt_ids, *[80] * len(observation)])

    def read(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Any) -> Any:
        calls = [{"id": "c", "function": {"name": "t", "arguments": "{}"}}]
        called = calls * (TOOL in token_ids if tools else 0)
        return {"role": "assistant", "content": str([*token_ids]), "tool_calls": called}

    def bridge(self, replies: Sequence[Any]) -> list[int]:
        return [90] * sum(len(reply["content"]) for reply in replies)


class ScriptedProcess:
    """An environment that replies with texts of given lengths, and then ends or fails."""

    def __init__(self, observation: int, replies: Sequence[int], fails: bool) -> None:
        self.observation, self.replies, self.fails = observation, list(replies), fails

    def ask(self, name: str, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        if method == "reset":
            return "o" * self.observation
        if method == "reward":
            return 0.5
        if not self.replies:
            if self.fails:
                raise EnvironmentFault("gone")
            return ("", False) if method == "tool" else None
        text = "r" * self.replies.pop(0)
        return (text, len(text) % 2 == 1) if method == "tool" else text


answers = st.lists(st.lists(st.integers(10, 60), max_size=4), min_size=1, max_size=6)


@given(
    answers=answers,
    tools=st.booleans(),
    observation=st.integers(0, 5),
    replies=st.lists(st.integers(1, 4), max_size=5),
    fails=st.booleans(),
    room=st.integers(1, 30),
    turns=st.integers(1, 5),
)
def test_ids_are_those_of_the_engine_and_the_mask_is_true_for_its_answers(
    answers: list[list[int]],
    tools: bool,
    observation: int,
    replies: list[int],
    fails: bool,
    room: int,
    turns: int,
) -> None:
    """The engine's prompts continue each other, and together with its answers are the row."""
    asked = list[tuple[list[int], list[int]]]()

    def ask(ids: Sequence[int], most: int, seed: int) -> Completion:
        assert most >= 1 and seed == 100 + len(asked)
        whole = [*answers[len(asked) % len(answers)], *[TOOL] * tools, STOP]
        own, ended = whole[:most], len(whole) <= most
        asked.append(([*ids], own))
        logprobs = [-float(token) for token in own]
        reason: Any = "stop" if ended else "length"
        versions = [len(asked)] * len(own)
        return Completion(
            token_ids=own, logprobs=logprobs, finish_reason=reason, weight_versions=versions
        )

    kind = EnvironmentKind(tools=[{}] * tools, replies=not tools, rewards=True)
    talk = Talk(form=ScriptedFormat(), ask=ask, kinds={"e": kind}, turns=turns, max_tokens=room)
    problem = SimpleNamespace(prompt_ids=array("i", [70, 71]), columns={}, turns=())
    process: Any = ScriptedProcess(observation, replies, fails)
    done = talk.converse(process, "e", problem, [100 + turn for turn in range(turns)])

    (only,) = done.rows
    row = only.ids
    assert len(row) <= 2 + room, "an observation counts like the rest"
    if observation >= room:
        assert not asked and "leaves no room" in done.scores[""].fault
        return
    assert 1 <= len(asked) == done.turns <= turns
    at = 0
    for prompt, own in asked:
        assert row[: len(prompt)] == prompt and len(prompt) >= at
        at = len(prompt) + len(own)
        assert row[len(prompt) : at] == own
    assert at == len(row), "nothing follows the last answer"
    sampled = [token for _, own in asked for token in own]
    learned = [token for token, own in zip(only.response_ids, only.learned, strict=True) if own]
    assert learned == sampled
    numbers = zip(only.logprobs, only.response_ids, only.learned, strict=True)
    assert all(number == (-token if own else 0.0) for number, token, own in numbers)
    assert only.weight_versions == sorted(only.weight_versions)
    assert len(only.weight_versions) == len(only.response_ids)
    assert done.scores in ({"": Score(reward=0.5)}, {"": Score(fault="gone")})


def test_a_prompt_without_an_environment_is_answered_once() -> None:
    def ask(ids: Sequence[int], most: int, seed: int) -> Completion:
        assert ([*ids], most, seed) == ([70], 9, 5)
        return Completion(
            token_ids=[4], logprobs=[-1.0], finish_reason="length", weight_versions=[0]
        )

    talk = Talk(form=ScriptedFormat(), ask=ask, kinds={}, turns=3, max_tokens=9)
    problem, process = SimpleNamespace(prompt_ids=array("i", [70])), Any
    done = talk.converse(process, None, problem, [5, 6, 7])  # type: ignore[arg-type]
    (row,) = done.rows
    assert (row.response_ids, row.learned, done.ended) == ([4], [True], False)
    assert done.text == "[4]" and done.scores == {}
