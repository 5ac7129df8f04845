"""`generate` that is interrupted, or in which an operation on the device fails, at any moment: no
request, page, row or lock is left, and the next answers are right.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache.radix import MambaRadixCache
from rollout import Engine, SamplingParams
from tests.helpers.case_selection import rounds
from tests.helpers.models import build_tiny
from tests.helpers.rollout.answers import check, random_prompts, run
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.tiers import conversations, make, tiered
from tests.helpers.rollout.updates import TINY, tiny
from tests.helpers.timed_interrupts import interrupted

PLAIN = SamplingParams(max_tokens=6, temperature=0)
CALLS = {  # what is asked at once; the pools are too small for it
    "greedy": PLAIN,
    "samples": SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=5),
    "beams": SamplingParams(max_tokens=4, temperature=0, beam_width=3, n=2),
}


LESS = ["plain", "host"]  # what these do, the others do, too
KINDS = ["hybrid", "disk", *(pytest.param(kind, marks=pytest.mark.extended) for kind in LESS)]


@pytest.fixture
def path(kind: str, saved: Saved) -> Path:
    return saved("qwen3_next")[0] if kind == "hybrid" else saved("qwen3", **TINY)[0]


def engine_of(kind: str, path: Path, folder: Path) -> Engine:
    if kind in ("plain", "hybrid"):
        return make(path, kv_tokens=160, prefix_states=3)
    files = {"disk_directory": str(folder), "disk_bytes": 1 << 16} if kind == "disk" else {}
    return tiered(path, kv_tokens=160, preemption="swap", host_bytes=1 << 16, **files)


def goes_on(engine: Engine) -> None:
    engine.check_integrity()
    assert not engine.scheduler.unfinished and not engine.scheduler.running
    cache = engine.prefixes.cache
    assert cache.protected_size == engine.prefixes.swapped_pages() == 0


def answers_are_right(engine: Engine) -> None:
    prompts, model = conversations()[:3], build_tiny("qwen3_next")
    if not isinstance(engine.prefixes.cache, MambaRadixCache):
        model = tiny(0)
    check(model, prompts, [[each] for each in run(engine, prompts, PLAIN)])
    engine.check_integrity()


def hit_at_random(engine: Engine, hit: Callable[[str], bool]) -> None:
    """hit: disturbs a call of `CALLS`, and tells whether it met it."""
    hits = 0
    for number in range(rounds(300, 10_000)):
        if hits == rounds(15, 1000):
            break
        hits += hit(list(CALLS)[number % len(CALLS)])
        goes_on(engine)
        if number % 6 == 0:
            answers_are_right(engine)
    assert hits == rounds(15, 1000)
    answers_are_right(engine)


def crowd() -> list[list[int]]:
    return conversations() + random_prompts((40, 12), seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_at_any_moment(kind: str, path: Path, tmp_path: Path) -> None:
    engine, draw, took = engine_of(kind, path, tmp_path), random.Random(kind), dict[str, float]()
    for name in [*CALLS] * 2:  # the first time is longer
        started = time.perf_counter()
        engine.generate(crowd(), CALLS[name])
        took[name] = time.perf_counter() - started

    def hit(name: str) -> bool:
        after = 1e-4 + draw.random() * took[name]
        return interrupted(partial(engine.generate, crowd(), CALLS[name]), after)

    hit_at_random(engine, hit)


class _Failing(TorchDispatchMode):
    """Operation number `at` from now on raises as a full device does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("injected")
        return function(*args, **(kwargs or {}))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_that_fails_at_any_moment(kind: str, path: Path, tmp_path: Path) -> None:
    engine, draw = engine_of(kind, path, tmp_path), random.Random(kind)
    counts: dict[str, int] = {}
    for name, params in CALLS.items():
        with _Failing(0) as mode:
            engine.generate(crowd(), params)
        counts[name] = -mode.left

    def hit(name: str) -> bool:
        with _Failing(draw.randint(1, counts[name])):
            try:
                engine.generate(crowd(), CALLS[name])
            except torch.OutOfMemoryError:
                return True
        return False

    hit_at_random(engine, hit)
