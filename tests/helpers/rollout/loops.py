"""Requests to an engine that a loop owns, and engines with a step under way."""

from __future__ import annotations

from typing import Any

from rollout import Completion, Engine, SamplingParams

LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CONFIG: dict[str, Any] = {"kv_tokens": 1024, "max_running": 8}


def params(number: int) -> SamplingParams:
    """Return the parameters of request `number`: other lengths, one or two samples."""
    return SamplingParams(max_tokens=3 + number % 9, n=1 + number % 2, seed=number, ignore_eos=True)


def overlapping(path: str, **options: Any) -> Engine:
    """Build an engine that launches a step before it reads the one before."""
    engine = Engine.from_pretrained(path, **{**CONFIG, **options})
    engine.steps.depth = 1
    return engine


def tokens(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in samples] for samples in answers]
