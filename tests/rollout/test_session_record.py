"""Records of sessions: rows have the ids that the engine computed, whatever an agent does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.setup.chat_turns import chat_of
from rollout import Completion, SamplingParams
from rollout.chats import RecordedRow, RecordedTurn, SessionRecord
from rollout.server import ChatFormat
from rollout.server.bodies import ChatBody
from tests.helpers.recipes.chat_forms import form_of

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
APPENDS = ("qwen2_5", "qwen3", "llama3_1", "phi3", "lfm2", "deepseek_r1_distill", "gemma3")
"""Templates after whose answers a user's message can follow."""


class Asked(NamedTuple):
    """A request and its answer."""

    prompt: list[int]
    answer: list[int]
    history: list[Any]
    continued: list[int] | None


@cache
def chat(name: str) -> ChatFormat:
    found: ChatFormat = chat_of(form_of(name), "task.agent")
    return found


def sent_back(message: dict[str, Any], way: int) -> dict[str, Any]:
    """Return a message as clients send it back: with nulls, without thoughts, in other orders."""
    if way == 1:
        return {**message, "refusal": None, "tool_calls": message.get("tool_calls")}
    if way == 2:
        return {name: message[name] for name in sorted(message) if name != "reasoning_content"}
    return message


class Session:
    """A session with a scripted engine, and an agent that does what numbers say."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.chat, self.rng = chat(name), rng
        params = SamplingParams(temperature=0.7, adapter="a")
        self.record = SessionRecord(self.chat, params, longest=3000, seed=5)
        self.asked: list[Asked] = []

    def ask(self, messages: list[Any], continued: list[int] | None) -> None:
        """Ask for an answer, which is drawn, and remember the conversation with it."""
        messages = ChatBody(messages=messages).messages
        prompt = self.record.encode(messages)
        params = self.record.params(prompt, SamplingParams(max_tokens=9999), {"max_tokens"})
        assert (params.temperature, params.adapter) == (0.7, "a")
        assert params.max_tokens == 3000 - len(prompt)
        ids = self.chat.tokenizer.encode("abcxyz", add_special_tokens=False)
        answer = self.rng.choices(ids, k=self.rng.randint(0, 4))
        ended = self.rng.random() < 0.7
        answer += [self.chat.tokenizer.eos_token_id] * ended
        number = float(len(self.asked))
        completion = Completion(
            token_ids=answer,
            logprobs=[-number - at / 8 for at in range(len(answer))],
            finish_reason="stop" if ended else "length",
            weight_versions=[int(number)] * len(answer),
        )
        text = self.chat.tokenizer.decode(answer, skip_special_tokens=True)
        message = {"role": "assistant", "content": text, "reasoning_content": "r"}
        turn = RecordedTurn(
            prompt_ids=prompt, completion=completion, messages=messages, answer=message
        )
        self.record.add(turn)
        said = [*messages, sent_back(message, self.rng.randint(0, 2))]
        self.asked.append(Asked(prompt, answer, said, continued))

    def act(self) -> None:
        """Begin anew, go on from any earlier state, try again, or edit what was said."""
        user = {"role": "user", "content": self.rng.choice(["one", "two", "three"])}
        earlier = [asked for asked in self.asked if asked.answer]
        what = self.rng.choice(["begin", "go on", "go on", "again", "edit"])
        if what == "begin" or not earlier:
            self.ask([user], None)
            return
        chosen = self.rng.choice(earlier)
        if what == "go on":
            self.ask([*chosen.history, user], [*chosen.prompt, *chosen.answer])
        elif what == "again":
            self.ask(chosen.history[:-1], chosen.continued)
        else:
            edited = {"role": "assistant", "content": "never said"}
            self.ask([*chosen.history[:-1], edited, user], None)


@given(seed=st.integers(0, 10**9), steps=st.integers(1, 12), name=st.sampled_from(APPENDS))
def test_rows_are_what_the_engine_computed(seed: int, steps: int, name: str) -> None:
    session = Session(name, rng := random.Random(seed))
    for _ in range(steps):
        session.act()
    rows = session.record.rows()
    found: list[tuple[list[int], list[int]]] = []
    for row in rows:
        assert len(row.learned) == len(row.logprobs) == len(row.weight_versions)
        for begin, end in learned_parts(row.learned):
            answer = row.response_ids[begin:end]
            before = [*row.prompt_ids, *row.response_ids[:begin]]
            found.append((before, answer))
            number = row.weight_versions[begin]
            assert session.asked[number].answer == answer
            assert row.logprobs[begin:end] == [-number - at / 8 for at in range(len(answer))]
        zeros = [n for n, own in zip(row.logprobs, row.learned, strict=True) if not own]
        assert not any(zeros)
    expected = [(asked.prompt, asked.answer) for asked in session.asked if asked.answer]
    assert sorted(found) == sorted(expected), "each answer is learned once, after its own prompt"
    for asked in session.asked:
        before = asked.continued or []
        assert asked.prompt[: len(before)] == before, "what was sampled is never rendered"
    rng.shuffle(session.record.turns)
    assert [vars(row) for row in session.record.rows()] == [vars(row) for row in rows]


def learned_parts(learned: Sequence[bool]) -> list[tuple[int, int]]:
    """Return begin and end of each answer; two of them never touch, see `test_rows_...`."""
    edges = [at for at in range(1, len(learned)) if learned[at] != learned[at - 1]]
    bounds = [0, *edges, len(learned)]
    return [(a, b) for a, b in pairwise(bounds) if b > a and learned[a]]


def test_appending_makes_one_row_and_a_template_that_cannot_forks() -> None:
    """Only tokens of replies are between; gpt-oss rewrites the end of an answer at each turn."""
    for name, count in (("qwen3", 1), ("gptoss", 4)):
        session = Session(name, random.Random(3))
        session.ask([{"role": "user", "content": "x"}], None)
        for _ in range(3):
            last = next(asked for asked in reversed(session.asked) if asked.answer)
            session.ask([*last.history, {"role": "user", "content": "y"}], None)
        assert len(session.record.turns) == 4, "choose another seed"
        rows = session.record.rows()
        assert len(rows) == count
        roles = [message["role"] for message in rows[0].messages]
        assert roles == (["assistant", "user"] * 4)[: 2 * (5 - count) - 1][: len(roles)]


def test_tokens_that_a_turn_computes_again_are_counted() -> None:
    row = RecordedRow(prompt_ids=[0] * 10)
    for cached, again in ((0, 0), (12, 0), (8, 11), (32, 11)):
        like: dict[str, Any] = {"logprobs": [0.0] * 3, "weight_versions": [0] * 3}
        answer = Completion(token_ids=[1] * 3, finish_reason="stop", cached_tokens=cached, **like)
        row.answered(answer, {"role": "assistant"})
        assert row.recomputed == again
        row.replied([2] * 4, [])


def test_tools_results_follow_calls_and_decide_the_history() -> None:
    record = Session("qwen3", random.Random(1)).record
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'},
    }
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    user = {"role": "user", "content": "go"}
    prompt = record.encode([user], [TOOL])
    own = [*chat("qwen3").tokenizer.encode("called"), chat("qwen3").tokenizer.eos_token_id]
    completion = Completion(
        token_ids=own,
        logprobs=[0.0] * len(own),
        finish_reason="stop",
        weight_versions=[0] * len(own),
    )
    turn = RecordedTurn(prompt_ids=prompt, completion=completion, messages=[user], answer=answer)
    record.add(turn, [TOOL])
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    respaced = {**call, "function": {"name": "f", "arguments": '{"a":2,"b":1}'}}
    back = {"role": "assistant", "content": None, "tool_calls": [respaced]}
    following = record.encode([user, back, result], [TOOL])
    assert following[: len(prompt) + len(own)] == [*prompt, *own]
    assert "42" in chat("qwen3").tokenizer.decode(following)
    other = {**call, "function": {"name": "f", "arguments": '{"a":3,"b":1}'}}
    for changed in (
        record.encode([user, {**back, "tool_calls": [other]}, result], [TOOL]),
        record.encode([user, back, result], []),
        record.encode([user, back, result], [TOOL], {"enable_thinking": False}),
    ):
        assert changed[: len(prompt) + len(own)] != [*prompt, *own]


@pytest.mark.parametrize(
    ("asked", "named", "why"),
    [
        ({"temperature": 0.5}, {"temperature"}, "temperature: this session samples at 0.7"),
        ({"top_p": 0.9}, {"top_p"}, "top_p: changes what is sampled"),
        ({"json_schema": "{}"}, {"response_format"}, "json_schema: changes"),
    ],
)
def test_another_distribution_is_refused(asked: Any, named: set[str], why: str) -> None:
    record = Session("qwen3", random.Random(1)).record
    with pytest.raises(ValueError, match=why):
        record.params([1], SamplingParams(**asked), named)


@pytest.mark.parametrize("calls", [[{}], ["f"], [{"function": "f"}], 5])
def test_messages_of_another_form_are_refused(calls: Any) -> None:
    record = Session("qwen3", random.Random(1)).record
    with pytest.raises(ValueError, match="messages: "):
        record.encode([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_equal_prompts_have_different_seeds_in_their_order() -> None:
    first, second = (Session("qwen3", random.Random(1)).record for _ in range(2))
    seeds = [first.params([1, 2], SamplingParams(), set()).seed for _ in range(3)]
    second.params([9], SamplingParams(), set())
    assert seeds == [second.params([1, 2], SamplingParams(), set()).seed for _ in range(3)]
    assert len({*seeds}) == 3
    assert first.params([1], SamplingParams(seed=4), set()).seed != 4
