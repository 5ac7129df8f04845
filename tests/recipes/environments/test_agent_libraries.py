"""Agents of other libraries, unchanged, against the server of a run with a scripted engine."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import openai
import pytest

from examples.agents import langgraph_agent, openai_agent, plain_agent
from recipes.setup.agent_server import AgentServer
from rollout import Completion, SamplingParams
from tests.helpers.recipes.chat_forms import form_of

FORM = form_of("qwen3")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\nI add.\n"
SAID = [THOUGHT + CALL, CALL, "It is 5."]
"""Answers in turn."""
ROW = {"prompt": "What is 2 + 3?", "answer": "5"}


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with closing(AgentServer(FORM, longest=20_000)) as server:
        yield server


class ScriptedEngine:
    """It says `SAID`, whatever it is asked, and keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Future[list[Completion]]:
        text = SAID[len(self.prompts)]
        self.prompts.append([*prompt])
        ids = FORM.tokenizer.encode(text, add_special_tokens=False)
        ids.append(FORM.tokenizer.eos_token_id)
        sample = Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason="stop",
            weight_versions=[1] * len(ids),
            cached_tokens=len(self.prompts),
        )
        answer: Future[list[Completion]] = Future()
        answer.set_result([sample])
        return answer


def streaming(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Act as `plain_agent`, with streams, and messages as dictionaries with nulls."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    asked: dict[str, Any] = {"model": model, "tools": [plain_agent.ADD]}
    while messages[-1]["role"] != "assistant" or messages[-1]["tool_calls"]:
        with client.chat.completions.stream(messages=messages, **asked) as pieces:
            said = pieces.get_final_completion().choices[0].message
        messages.append(said.model_dump(exclude={"parsed"}))
        for call in said.tool_calls or ():
            reply = {"role": "tool", "tool_call_id": call.id, "content": plain_agent.add(call)}
            messages.append(reply)
    return float(row["answer"] in (said.content or ""))


AGENTS = [plain_agent.solve, streaming, openai_agent.solve, langgraph_agent.solve]


@pytest.mark.parametrize("solve", AGENTS, ids=lambda solve: solve.__module__.rpartition(".")[2])
def test_a_conversation_is_one_row_of_what_was_sampled(server: AgentServer, solve: Any) -> None:
    """Thoughts, which clients do not send back, and the tokens of tool calls stay as they were."""
    engine = ScriptedEngine()
    params = SamplingParams(temperature=1.0)
    with server.answering(engine.submit), server.session(params, seed=1) as (access, record):
        reward = solve(row=ROW, **access)
        assert (asyncio.run(reward) if inspect.isawaitable(reward) else reward) == 1.0
    (row,) = record.rows()
    assert len(engine.prompts) == len(SAID)
    for prompt in engine.prompts:
        assert row.ids[: len(prompt)] == prompt
    end = FORM.tokenizer.eos_token
    own = [token for token, learned in zip(row.response_ids, row.learned, strict=True) if learned]
    assert FORM.tokenizer.decode(own) == "".join(f"{text}{end}" for text in SAID)
    assert FORM.tokenizer.decode(row.ids).count("<tool_response>\n5\n</tool_response>") == 2
    roles = [message["role"] for message in row.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert row.ended and not record.cut_off
    assert [turn.completion.cached_tokens for turn in record.turns] == [1, 2, 3]


COMMAND = """
import openai
said = openai.OpenAI().chat.completions.create(
    model="policy", messages=[{"role": "user", "content": "hello"}]
)
print(said.choices[0].message.content)
"""


def test_a_command_finds_the_model_in_its_environment(server: AgentServer) -> None:
    engine = ScriptedEngine()
    with server.answering(engine.submit), server.session(SamplingParams(), 1) as (access, record):
        names = {f"OPENAI_{name.upper()}": access[name] for name in ("base_url", "api_key")}
        command = [sys.executable, "-c", COMMAND]
        said = subprocess.run(command, env=names, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "I add.\n" + CALL, "without tools, calls are text"
    assert len(record.rows()) == 1


def test_sessions_end_and_keys_are_needed(server: AgentServer) -> None:
    """No engine between two steps; no answer after the end of a session, or for strangers."""
    with server.session(SamplingParams(), 1) as (access, record):
        url, key = access["base_url"], access["api_key"]
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(openai.InternalServerError, match="no engine answers now"):
            client.chat.completions.create(**asked)
        with pytest.raises(openai.NotFoundError, match="gpt-5 is not served here; policy is"):
            client.chat.completions.create(**{**asked, "model": "gpt-5"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").chat.completions.create(**asked)
    with pytest.raises(openai.NotFoundError, match="this session has ended"):
        client.chat.completions.create(**asked)
    outside = client.with_options(base_url=url.partition("/sessions")[0] + "/v1")
    with pytest.raises(openai.NotFoundError):
        outside.chat.completions.create(**asked)
    assert record.turns == []


def test_an_engine_that_fails_ends_the_request(server: AgentServer) -> None:
    def fail(prompt: Sequence[int], params: SamplingParams) -> Future[list[Completion]]:
        answer: Future[list[Completion]] = Future()
        answer.set_exception(FloatingPointError("not finite"))
        return answer

    with server.answering(fail), server.session(SamplingParams(), 1) as (access, record):
        url, key = access["base_url"], access["api_key"]
        for stream in (False, True):
            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            with pytest.raises(openai.InternalServerError, match="not finite"):
                client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "x"}], stream=stream
                )
    assert record.turns == []
