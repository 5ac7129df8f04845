"""Preemption by recomputation and by swap: same answers, and no pages or locks left behind."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import Completion, SamplingParams
from tests.helpers.case_selection import pairwise
from tests.helpers.rollout.answers import assert_same, check, random_prompts, run
from tests.helpers.rollout.tiers import blocks_of, failing, make, swap_if, tiered
from tests.helpers.rollout.updates import tiny

LONG = SamplingParams(max_tokens=28, temperature=0)
CROWD = (20, 25, 30, 16, 23)


def crowd() -> list[list[int]]:
    return random_prompts(CROWD, seed=4)


SAMPLED = SamplingParams(max_tokens=28, temperature=1.3, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def uncrowded(path: Path) -> Callable[[str, SamplingParams], list[list[Completion]]]:
    """Return a function for the answers to the crowd in a pool with room for all of it."""

    @functools.cache
    def answers(device: str, params: SamplingParams) -> list[list[Completion]]:
        plain = make(path, device=device, prefix_cache=False, kv_tokens=2048)
        out = plain.generate(crowd(), params)
        assert plain.scheduler.preemptions == 0
        return out

    return answers


@pytest.mark.parametrize(
    ("way", "params", "n"), pairwise(["recompute", "swap", "both"], [LONG, SAMPLED], [1, 3])
)
def test_preempted_samples_answer_as_without_preemption(
    path: Path, uncrowded: Any, params: SamplingParams, n: int, way: str, device: str
) -> None:
    """Check also that the model computes every token of swapped samples only once."""
    engine = tiered(path, device=device, kv_tokens=104, preemption="swap" if way == "both" else way)
    if way == "both":
        turns = itertools.cycle([True, False])
        swap_if(engine, lambda: next(turns))
    params = replace(params, n=n)
    out = engine.generate(crowd(), params, on_progress=lambda *_: engine.check_integrity())
    for actual, expected in zip(out, uncrowded(device, params), strict=True):
        assert_same(actual, expected)
    stats = engine.stats
    assert (stats.preempted_swap > 0) == (way != "recompute")
    assert (stats.preempted_recompute > 0) == (way != "swap")
    assert stats.preempted_swap + stats.preempted_recompute == engine.scheduler.preemptions
    if way == "swap":
        assert stats.preempted_swap == stats.swapped_back
        assert n > 1 or stats.computed_tokens == sum(CROWD) + len(CROWD) * (LONG.max_tokens - 1)


def test_samples_are_recomputed_when_the_host_has_no_room(path: Path) -> None:
    host_bytes = 2 * 4 * 2 * 2 * 2 * 16 * 4  # two pages
    engine = tiered(path, kv_tokens=96, preemption="swap", host_bytes=host_bytes)
    check(tiny(0), crowd(), [[answer] for answer in run(engine, crowd(), LONG)])
    assert engine.stats.preempted_recompute > 0


def test_swapped_pages_that_the_host_drops_are_computed_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiered(path, kv_tokens=96, preemption="swap")
    caplog.set_level(logging.INFO, logger="rollout")

    def drop(*_: int) -> None:
        if any(sample.swapped for sample in engine.scheduler.waiting):
            blocks_of(engine).tiers.lower.clear()
            blocks_of(engine).tiers.evict(10**6)
        engine.check_integrity()

    out = engine.generate(crowd(), LONG, on_progress=drop)
    check(tiny(0), crowd(), out)
    assert engine.stats.swapped_back < engine.stats.preempted_swap
    assert "the tiers dropped pages" in caplog.text


@pytest.mark.parametrize("method", ["forward", "sample"])
def test_failed_step_leaves_no_swapped_pages_or_locks(
    path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, params = tiered(path, 96, preemption="swap"), replace(LONG, max_tokens=40)
    for at in (1, 20, 35, 50):  # samples are swapped at some of these calls
        with failing(engine.runner, method, at, monkeypatch):
            engine.generate(crowd(), params)
        engine.check_integrity()
        assert blocks_of(engine).swapped_pages() == 0
        assert blocks_of(engine).tiers.protected_size == 0
    assert engine.stats.preempted_swap > 0
    check(tiny(0), crowd(), [[answer] for answer in run(engine, crowd(), LONG)])
