"""Defines the messages between prefill and decode ranks: plain data (`memsaver.common.plain`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcache.staging import Watermark
from memsaver import Ticket
from memsaver.common.plain import Plain
from rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Names a rank. geometry: of the model and of what the pool keeps; must be equal on both sides.

    ring_bytes, ticket: of a decode rank's ring, and what a writer needs to reach it."""

    tp_size: int
    tp_rank: int
    geometry: str
    ring_bytes: int = 0
    ticket: Any = None


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bytes of a decode rank's ring for tokens [first, first + tokens) of a prompt, the writers'
    heads in a row.
    """

    first: int
    tokens: int
    offset: int
    nbytes: int
    round: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, kw_only=True)
class Ask:
    """decode -> prefill: compute this prompt and its samples' first tokens; keys and values go into
    the ranges.

    Numbers rise by one. indices: of the samples that share the prompt, which decide with the seed
    what is drawn.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    indices: tuple[int, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class First:
    """The first token of each sample, and the version of the weights that all of it was computed
    with.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass(frozen=True, kw_only=True)
class Filled:
    """prefill -> decode: this writer's part of the `nth` range is written, or on its way."""

    number: int
    nth: int
    first: First


@dataclass(frozen=True, kw_only=True)
class Refused:
    """prefill -> decode: nothing will come, and why."""

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Freed:
    """decode -> prefill: the ring's watermark."""

    watermark: Watermark


@dataclass(frozen=True, kw_only=True)
class Closed:
    """decode -> prefill: no more requests."""


Message = Hello | Ask | Filled | Refused | Freed | Closed
PLAIN = Plain(
    Hello, Ask, Range, First, Filled, Refused, Freed, Closed, SamplingParams, Watermark, Ticket
)
"""How they travel."""
