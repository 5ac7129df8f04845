"""Agents for tests, which ask the model by itself: they go on, go back, start anew, and fail."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai


def talkative(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Ask three times, each after what was said before; reward short answers."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    length = 0
    for turn in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
        said = answer.choices[0].message
        messages += [said.model_dump(), {"role": "user", "content": str(turn)}]
        length += len(said.content or "")
    return -length / 10


async def forking(row: dict[str, Any]) -> float:
    """Ask once, try the second answer three times at once, and ask another persona besides."""
    client = openai.AsyncOpenAI(max_retries=0)  # where OPENAI_BASE_URL says

    async def ask(*messages: Any) -> Any:
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=6
        )
        return answer.choices[0].message.model_dump(exclude_none=True)

    begin = {"role": "user", "content": row["prompt"]}
    first = await ask(begin)
    again = {"role": "user", "content": "again"}
    system = {"role": "system", "content": "7"}
    asked = [ask(begin, first, again) for _ in range(3)]
    answers = await asyncio.gather(
        *asked, ask(system, begin), ask(begin, {**first, "content": "3"}, again)
    )
    return sum(len(answer["content"]) for answer in [first, *answers]) / 100


def silent(row: dict[str, Any]) -> float:
    return 1.0


def hot(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask for another temperature."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    begin: Any = [{"role": "user", "content": row["prompt"]}]
    client.chat.completions.create(model="policy", messages=begin, temperature=0.3)
    return 1.0


def leaving(row: dict[str, Any], base_url: str, api_key: str) -> float | None:
    """Leave a stream after its first piece, then ask again; give no reward."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    begin: Any = [{"role": "user", "content": row["prompt"]}]
    next(iter(client.chat.completions.create(model="policy", messages=begin, stream=True)))
    client.close()
    asked = openai.OpenAI(max_retries=0).chat.completions
    for piece in asked.create(model="policy", messages=begin, stream=True, max_tokens=5):
        json.dumps(piece.model_dump())
    return None


def late(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask a session that does not exist."""
    url = base_url.replace("/v1", "x/v1") + "/chat/completions"
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request) as answer:
        return float(answer.status)


def endless(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return no number, after an answer."""
    talkative(row, base_url, api_key, "policy")
    return float("nan")


def asleep(row: dict[str, Any]) -> None:
    time.sleep(60)


def crashing(row: dict[str, Any]) -> None:
    os._exit(3)


_IN_TURN = [talkative, silent, hot, leaving, late, endless, asleep, crashing]


def mixed(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float | None:
    """Act as another agent in each conversation, which are counted in a file."""
    with Path(os.environ["AGENTS_TURN"]).open("a") as file:
        turn = file.tell()
        file.write(".")
    agent: Any = _IN_TURN[turn % len(_IN_TURN)]
    given = {"row": row, "base_url": base_url, "api_key": api_key, "model": model}
    taken = agent.__code__.co_varnames[: agent.__code__.co_argcount]
    reward: float | None = agent(**{name: given[name] for name in taken})
    return reward
