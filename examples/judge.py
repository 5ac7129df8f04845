"""Reward functions that ask a model: a judge behind an HTTP server, and a model in the worker.

    task:
      rewards: ["examples.judge:helpful", "examples.judge:fluent"]
      reward_weights: [1.0, 0.1]
      timeout: 120 # the first call in a worker loads its model

`helpful` needs a server with the API of OpenAI, such as `vllm serve MODEL`, on another GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from functools import cache
from typing import Any

URL = os.environ.get("JUDGE_URL", "http://localhost:8000/v1/chat/completions")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
SCORER = os.environ.get("REWARD_MODEL", "cross-encoder/ms-marco-MiniLM-L6-v2")
AT_ONCE = 16  # requests of each worker
QUESTION = "How helpful is the answer, from 0 to 10? Reply with a number.\n\nQ: {}\n\nA: {}"


async def helpful(prompt: str, completion: str) -> float | None:
    """Return the judge's grade from 0 to 1; None, and so no reward, if its reply has no number."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION.format(prompt, completion)}],
    }
    async with free_connection():
        reply = await asyncio.to_thread(post, body)
    grade = re.search(r"\d+", reply["choices"][0]["message"]["content"])
    return min(int(grade[0]), 10) / 10 if grade else None


@cache
def free_connection() -> asyncio.Semaphore:
    return asyncio.Semaphore(AT_ONCE)


def post(body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        reply: dict[str, Any] = json.load(response)
    return reply


def fluent(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return the logits of a classifier for all answers in one batch."""
    import torch

    tokenizer, model = reward_model()
    batch = tokenizer(prompts, completions, return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        logits: list[float] = model(**batch).logits[:, 0].tolist()
    return logits


@cache
def reward_model() -> Any:
    """Load the tokenizer and the model once in each worker, on the CPU."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(SCORER)
    return AutoTokenizer.from_pretrained(SCORER), model.eval()


if __name__ == "__main__":
    raise SystemExit("nothing to run; name it in a recipe: task.rewards=examples/judge.py:helpful")
