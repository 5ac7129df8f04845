"""`generate` that is interrupted, or in which an operation on the device fails, at any moment: no
request, page, row or lock is left, and the next answers are right.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache.radix import MambaRadixCache
from rollout import Engine, SamplingParams
from tests.helpers.alarms import interrupted
from tests.helpers.disks import read_only
from tests.helpers.effort import rounds
from tests.helpers.models import build_tiny
from tests.helpers.rollout.answers import check, random_prompts, run
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.tiers import blocks_of, conversations, make, tiered
from tests.helpers.rollout.updates import TINY, tiny

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


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_at_any_moment(kind: str, path: Path, tmp_path: Path) -> None:
    engine, draw, hits = engine_of(kind, path, tmp_path), random.Random(kind), 0
    prompts = conversations() + random_prompts((40, 12), seed=3)
    took: dict[str, float] = {}
    for name, params in CALLS.items():
        for _ in range(2):  # the first time is longer
            started = time.perf_counter()
            engine.generate(prompts, params)
            took[name] = time.perf_counter() - started
    for number in range(rounds(300, 10_000)):
        if hits == rounds(15, 1000):
            break
        name = list(CALLS)[number % len(CALLS)]
        hits += interrupted(
            partial(engine.generate, prompts, CALLS[name]), 1e-4 + draw.random() * took[name]
        )
        goes_on(engine)
        if number % 6 == 0:
            answers_are_right(engine)
    assert hits == rounds(15, 1000)
    answers_are_right(engine)


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


@contextmanager
def failing(at: int) -> Iterator[_Failing]:
    with _Failing(at) as mode:
        yield mode


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_that_fails_at_any_moment(kind: str, path: Path, tmp_path: Path) -> None:
    engine, draw = engine_of(kind, path, tmp_path), random.Random(kind)
    prompts = conversations() + random_prompts((40, 12), seed=3)
    counts: dict[str, int] = {}
    for name, params in CALLS.items():
        with failing(0) as mode:
            engine.generate(prompts, params)
        counts[name] = -mode.left
    raised = 0
    for number in range(rounds(300, 10_000)):
        if raised == rounds(15, 1000):
            break
        name = list(CALLS)[number % len(CALLS)]
        with failing(draw.randint(1, counts[name])) as mode:
            try:
                engine.generate(prompts, CALLS[name])
            except torch.OutOfMemoryError:
                raised += 1
        goes_on(engine)
        if number % 6 == 0:
            answers_are_right(engine)
    assert raised == rounds(15, 1000)
    answers_are_right(engine)


@pytest.mark.parametrize("kind", ["disk"])
def test_a_disk_that_becomes_read_only_costs_no_request(
    kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither meanwhile nor later."""
    engine = engine_of(kind, path, tmp_path)
    answers_are_right(engine)
    for healthy in (True, False, True, False, True):
        with monkeypatch.context() as patch:
            if not healthy:
                read_only(patch, tmp_path)
            for number in range(6):
                prompts = random_prompts((40, 33, 25, 40), seed=10 + number)
                check(tiny(0), prompts, [[each] for each in run(engine, prompts, PLAIN)])
                engine.check_integrity()
    lower = blocks_of(engine).tiers.lower
    assert lower.disk is not None and lower.lost_pages > 0 and "EROFS" in str(lower.disk_error)
    lost = lower.lost_pages
    answers_are_right(engine)
    assert lower.lost_pages == lost
