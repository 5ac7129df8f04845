"""`generate` is interrupted, or an operation on the device fails, at random moments.

No request, page, row or lock is left, and the next answers are right.
"""

from __future__ import annotations

import contextlib
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
CALLS = {  # the pools are too small for all samples of a call
    "greedy": PLAIN,
    "samples": SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=5),
    "beams": SamplingParams(max_tokens=4, temperature=0, beam_width=3, n=2),
}


KINDS = ["hybrid", "disk"]  # together they run the code of every other kind


@pytest.fixture
def path(kind: str, saved: Saved) -> Path:
    return saved("qwen3_next")[0] if kind == "hybrid" else saved("qwen3", **TINY)[0]


def engine_of(kind: str, path: Path, folder: Path) -> Engine:
    """Build an engine that launches each step before it has read the one before."""
    if kind == "hybrid":
        engine = make(path, kv_tokens=160, prefix_states=3)
    else:
        files = {"disk_directory": str(folder), "disk_bytes": 1 << 16}
        engine = tiered(path, kv_tokens=160, preemption="swap", host_bytes=1 << 16, **files)
    engine.steps.depth = 1
    return engine


def check_nothing_left(engine: Engine) -> None:
    engine.check_integrity()
    assert not engine.scheduler.unfinished and not engine.scheduler.running
    assert not engine.steps.under_way
    cache = engine.prefixes.cache
    assert cache.protected_size == engine.prefixes.swapped_pages() == 0


def check_answers(engine: Engine) -> None:
    prompts, model = conversations()[:3], build_tiny("qwen3_next")
    if not isinstance(engine.prefixes.cache, MambaRadixCache):
        model = tiny(0)
    check(model, prompts, [[answer] for answer in run(engine, prompts, PLAIN)])
    engine.check_integrity()


def hit_at_random(engine: Engine, hit: Callable[[str], bool], wanted: int) -> None:
    """Run disturbed calls until `wanted` of them were hit.

    Args:
        engine: The engine.
        hit: Disturbs a call of `CALLS`; returns whether the disturbance came during the call.
        wanted: Number of hits.
    """
    hits = 0
    for number in range(10 * wanted):
        if hits == wanted:
            break
        hits += hit(list(CALLS)[number % len(CALLS)])
        check_nothing_left(engine)
        if number % 6 == 0:
            check_answers(engine)
    assert hits == wanted
    check_answers(engine)


def crowd() -> list[list[int]]:
    return conversations() + random_prompts((40, 12), seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_signal_at_a_random_moment_leaves_nothing_behind(
    kind: str, path: Path, tmp_path: Path
) -> None:
    engine, draw, took = engine_of(kind, path, tmp_path), random.Random(kind), dict[str, float]()
    for name in [*CALLS] * 2:  # the first call takes longer
        started = time.perf_counter()
        engine.generate(crowd(), CALLS[name])
        took[name] = time.perf_counter() - started

    def hit(name: str) -> bool:
        after = 1e-4 + draw.random() * took[name]
        return interrupted(partial(engine.generate, crowd(), CALLS[name]), after)

    hit_at_random(engine, hit, rounds(4, 1000))


class _Failing(TorchDispatchMode):
    """Mode in which operation number `at` raises an out-of-memory error."""

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
def test_failed_operation_at_a_random_moment_leaves_nothing_behind(
    kind: str, path: Path, tmp_path: Path
) -> None:
    engine, draw = engine_of(kind, path, tmp_path), random.Random(kind)
    counts: dict[str, int] = {}
    for name, params in CALLS.items():
        with _Failing(0) as mode:
            engine.generate(crowd(), params)
        counts[name] = -mode.left

    def hit(name: str) -> bool:
        """Fail once: between two steps the call fails, a step is repeated."""
        with _Failing(draw.randint(1, counts[name])) as mode:
            with contextlib.suppress(torch.OutOfMemoryError):
                engine.generate(crowd(), CALLS[name])
        return mode.left <= 0

    hit_at_random(engine, hit, rounds(8, 1000))
