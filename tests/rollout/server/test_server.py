"""The server of an engine: answers, streams, tools, refusals, clients that go or are slow."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollout import SamplingParams
from tests.helpers.memsaver.savers import until
from tests.helpers.recipes.models import save_byte_model
from tests.helpers.rollout.serving import ADMIN, API, Served, serving

LONG: dict[str, Any] = {"model": "m", "max_tokens": 1500, "temperature": 0}
CALL = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    with serving(path, max_body_bytes=1 << 16, max_waiting=4) as served:
        yield served


def headers(key: str = API) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def text_of(chunks: Any, field: str = "text") -> dict[int, str]:
    """Join the pieces of a stream, by choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if field == "text" else getattr(choice.delta, field, None)
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts


def test_streams_tell_the_answers_of_the_engine(served: Served) -> None:
    """Two prompts with two samples each, as texts and as ids, with log-probabilities."""
    client = served.client()
    params = SamplingParams(max_tokens=20, n=2, seed=7, top_p=0.9, top_logprobs=2)
    prompts = [[70, 71, 72], [80, 81]]
    asked: dict[str, Any] = {"model": "m", "prompt": prompts, "max_tokens": 20, "n": 2, "seed": 7}
    asked |= {"top_p": 0.9, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**asked)
    streamed = [*client.completions.create(**asked, stream=True)]
    futures = [served.shared.engine.generate([prompt], params) for prompt in prompts]
    expected = [sample for (samples,) in futures for sample in samples]
    ids = [choice.token_ids for choice in whole.choices]  # type: ignore[attr-defined]
    assert ids == [sample.token_ids for sample in expected]
    told = [choice.logprobs.token_logprobs for choice in whole.choices]  # type: ignore[union-attr]
    assert told == [sample.logprobs for sample in expected]
    assert text_of(streamed) == {choice.index: choice.text for choice in whole.choices}
    assert len(streamed) > 4
    parts: dict[int, list[int]] = {}
    for chunk in streamed:
        for choice in chunk.choices:
            parts.setdefault(choice.index, []).extend(choice.token_ids)  # type: ignore[attr-defined]
    assert [parts[index] for index in range(4)] == ids
    assert whole.usage is not None and whole.usage.total_tokens == 5 + 80
    sent = {"token_ids": prompts[0], "max_tokens": 20, "n": 2, "seed": 7, "top_p": 0.9}
    sent["prompt_logprobs"] = 1
    url = f"{served.url}/inference/v1/generate"
    generated = httpx.post(url, json=sent, headers=headers()).json()
    first, *scores = generated["choices"][0]["prompt_logprobs"]
    assert first is None and [next(iter(score)) for score in scores] == ["71", "72"]
    assert [choice["token_ids"] for choice in generated["choices"]] == ids[:2]
    assert generated["choices"][0]["weight_versions"] == [0] * 20


def test_chat_ends_at_a_stop_string_and_tells_log_probabilities(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {**LONG, "max_tokens": 60, "seed": 5, "temperature": 1.0}
    asked["messages"] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    plain = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = plain[10:12]
    asked |= {"stop": [stop, "never"], "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.message.content == plain[: plain.find(stop)] and choice.finish_reason == "stop"
    assert whole.usage is not None and choice.logprobs is not None
    assert len(choice.logprobs.content or ()) == whole.usage.completion_tokens < 40
    usage = {"include_usage": True}
    streamed = [*client.chat.completions.create(**asked, stream=True, stream_options=usage)]
    assert text_of(streamed, "content") == {0: choice.message.content}
    assert streamed[-1].usage == whole.usage
    served.idle()


def test_content_follows_a_schema(served: Served) -> None:
    rules = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema = {"name": "choice", "schema": {**rules, "additionalProperties": False}, "strict": True}
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    form = {"type": "json_schema", "json_schema": schema}
    answer = served.client().chat.completions.create(**asked, response_format=form)  # type: ignore[call-overload]
    assert json.loads(answer.choices[0].message.content)["a"] in ("x", "y")
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": 5}}}
    with pytest.raises(openai.BadRequestError, match="json_schema: xgrammar refuses it"):
        served.client().chat.completions.create(**asked, response_format=form)  # type: ignore[call-overload]


def test_tool_calls_and_thoughts_are_told_in_streams_as_in_whole(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = save_byte_model(tmp_path, tools=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    broken = "<tool_call>{oops</tool_call>"
    text = f"<think>so é</think>I add.<tool_call>{CALL}</tool_call>"
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "1+1"}]}
    asked |= {"tools": [TOOL], "extra_body": {"return_token_ids": True}}
    for answer, content, calls in ((text, "I add.", 1), (text + broken, "I add.{oops", 1)):
        ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        with serving(path, forced=ids) as served:
            client = served.client()
            choice = client.chat.completions.create(**asked).choices[0]
            assert choice.token_ids == ids  # type: ignore[attr-defined]
            message: Any = choice.message
            assert (message.reasoning_content, message.content) == ("so é", content)
            assert len(message.tool_calls) == calls and choice.finish_reason == "tool_calls"
            assert message.tool_calls[0].function.name == "add"
            assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": "é"}
            chunks = [*client.chat.completions.create(**asked, stream=True)]
            assert text_of(chunks, "content") == {0: content}
            assert text_of(chunks, "reasoning_content") == {0: "so é"}
            deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
            told = [call for delta in deltas for call in delta.tool_calls or ()]
            assert [call.function.arguments for call in told] == [
                call.function.arguments for call in message.tool_calls
            ]
            pieces: list[Any] = [chunk.choices[0] for chunk in chunks]
            assert [*chain.from_iterable(piece.token_ids for piece in pieces)] == ids
            for stream in (False, True):
                cut: Any = client.chat.completions.create(**asked, stop=["dd.", "x"], stream=stream)
                pieces = [*cut] if stream else [cut]
                told = [part for piece in pieces for part in piece.choices]
                texts = [part.delta if stream else part.message for part in told]
                assert "".join(text.content or "" for text in texts) == "I a"
                assert told[-1].finish_reason == "stop" and not texts[-1].tool_calls
            both: list[Any] = [
                client.chat.completions.create(**asked, tool_choice=choice)
                for choice in ("none", "auto")
            ]
            none = both[0].choices[0].message
            assert none.tool_calls is None and CALL in (none.content or "")
            assert both[0].prompt_token_ids == both[1].prompt_token_ids, "it goes on from others"


@pytest.mark.parametrize(
    ("route", "body", "status", "why"),
    [
        ("completions", {"foo": 1}, 400, "foo: is not served here"),
        ("completions", {"best_of": 3}, 400, "best_of: is not served here"),
        ("completions", {"temperature": -1}, 400, "temperature=-1.0 must be 0"),
        ("completions", {"temperature": "warm"}, 400, "temperature: Input should be a valid"),
        ("completions", {"stop": ""}, 400, "stop: an empty text"),
        ("completions", {"stop": ["a", ""]}, 400, "stop: an empty text"),
        ("completions", {"prompt": [9999]}, 400, "the prompt has token ids outside"),
        ("completions", {"prompt": []}, 400, "prompt: has no prompts"),
        ("completions", {"prompt": [70] * 3000}, 400, "has 3000 (context_length_exceeded)"),
        ("completions", {"model": "gpt"}, 404, "model: gpt is not served here; m is"),
        ("completions", {"logit_bias": {"5": "x"}}, 400, "logit_bias.5: Input should be a valid"),
        ("chat/completions", {"messages": []}, 400,
         "messages: the chat template refuses them: Cannot apply"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         400, "messages: content of type 'image_url'"),
        ("chat/completions", {"messages": [{"content": "a"}], "top_logprobs": 2}, 400,
         "top_logprobs needs logprobs=true"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}, 400,
         "tools: the model's chat template has no tool calls"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}],
         "response_format": {"type": "json_schema"}}, 400, "json_schema: is missing"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(
    served: Served, route: str, body: dict[str, Any], status: int, why: str
) -> None:
    given = ({"prompt": "a"} if route == "completions" else {}) | body
    for stream in (False, True):
        sent = {**given, "stream": stream}
        answer = httpx.post(f"{served.url}/v1/{route}", json=sent, headers=headers())
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == status, answer.text
        assert why in error["message"]
    served.idle()


def test_large_bodies_are_refused_before_they_are_held(served: Served) -> None:
    for body in ({"prompt": "a" * (1 << 16)}, {"messages": ["a" * 9999] * 9}):
        sent = {"content": json.dumps(body), "headers": headers()}
        assert httpx.post(f"{served.url}/v1/completions", **sent).status_code == 413  # type: ignore[arg-type]


def test_sessions_are_told_to_the_engines(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    submit = served.shared.submit

    def noting(prompt: Any, params: Any, session: Any) -> Any:
        told.append(session)
        return submit(prompt, params, session)

    monkeypatch.setattr(served.shared, "submit", noting)
    for place in ("", "/sessions/a b"):
        client = openai.OpenAI(base_url=f"{served.url}{place}/v1", api_key=API, max_retries=0)
        client.completions.create(model="m", prompt="a", max_tokens=2)
    assert told == [None, "a b"]


def test_keys_are_needed_and_pauses_need_another(served: Served) -> None:
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        stranger.models.list()
    assert [model.id for model in served.client().models.list()] == ["m"]
    for key in (API, "x", "clé"):
        sent = {"authorization": f"Bearer {key}".encode()}
        assert httpx.post(f"{served.url}/pause", headers=sent).status_code == 401
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/metrics").status_code == 401
    figures = httpx.get(f"{served.url}/metrics", headers=headers()).text
    assert "memsaver_requests_total" in figures


def test_requests_wait_during_a_pause_and_too_many_are_refused(served: Served, path: Path) -> None:
    def post(served: Served, route: str) -> httpx.Response:
        return httpx.post(f"{served.url}/{route}", headers=headers(ADMIN))

    assert post(served, "pause?mode=no").status_code == 400
    assert post(served, "pause?mode=abort").json() == {"paused": True}
    answers: list[Any] = []
    ask = {"model": "m", "prompt": "a", "max_tokens": 3}
    asking = [
        threading.Thread(target=lambda: answers.append(served.client().completions.create(**ask)))
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    until(lambda: served.shared.full)
    refused = httpx.post(f"{served.url}/v1/completions", json=ask, headers=headers())
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert "4 requests with 16 tokens wait" in refused.json()["error"]["message"]
    assert not answers and post(served, "resume").json() == {"paused": False}
    for thread in asking:
        thread.join(60)
    assert len(answers) == 4
    with serving(path, paused="refuse") as other:
        post(other, "pause")
        refused = httpx.post(f"{other.url}/v1/completions", json=ask, headers=headers())
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        post(other, "resume")
        other.client().completions.create(**ask)


def test_requests_end_with_their_clients(served: Served) -> None:
    """One that reads a part of a stream, one that waits for a whole answer, one that never asks."""
    client = served.client()
    with client.completions.create(**LONG, prompt="a", stream=True) as stream:
        next(iter(stream))
    served.idle()
    with pytest.raises(openai.APITimeoutError):
        served.client(timeout=0.3).completions.create(**LONG, prompt="a")
    served.idle()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
        assert len(client.completions.create(model="m", prompt="a").choices) == 1
    served.idle()


def test_slow_reader_holds_nobody_up(served: Served) -> None:
    body = json.dumps({"prompt": "a", **LONG, "max_tokens": 500, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {API}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        slow.sendall(head.encode() + body)
        read = b"".join(slow.recv(1) for _ in range(50))
        served.client().completions.create(model="m", prompt="a", max_tokens=30)
        served.idle()  # the engine has long ended the answer that is still being read
        began = time.monotonic()
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            assert time.monotonic() < began + 30
            read += slow.recv(65536)
    assert read.count(b"data: ") > 2
