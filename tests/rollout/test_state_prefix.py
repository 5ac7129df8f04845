"""The engine's prefix cache for models with linear layers, which caches pages and states.

Answers stay the same for less work, and no page, lock or state is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import ReqHandle
from rollout import Completion, Engine
from tests.helpers.case_selection import some
from tests.helpers.rollout.answers import (
    GREEDY,
    STATES_GAP,
    assert_same,
    check,
    random_groups,
    random_prompts,
    run,
    spent,
)
from tests.helpers.rollout.poison import check_idle, kept_states, poison
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.tiers import PAGE, conversations, make

LAYER_TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": LAYER_TYPES}
DECODED = GREEDY.max_tokens - 1


@pytest.fixture
def tiny_path(saved: Saved) -> Path:
    return saved("qwen3_next")[0]


def same(actual: list[Completion], expected: list[Completion]) -> None:
    assert_same(actual, expected, STATES_GAP)


@pytest.mark.parametrize(
    ("shape", "chunk", "states"),
    some(
        (SHAPE, 24, 2),
        ({}, 7, 3),
        whole=[({}, 512, 16), (SHAPE, 512, 16), ({}, 24, 2), (SHAPE, 7, 3)],
    ),
)
def test_answers_with_and_without_prefix_cache_are_equal(
    saved: Saved, shape: dict[str, Any], chunk: int, states: int, device: str
) -> None:
    """Repeat prompts in batches and alone, also when only a few of them can have states.

    All unused slots and states are filled with NaN.
    """
    path, model = saved("qwen3_next", **shape)
    fields = {"max_prefill_tokens": chunk, "device": device}
    plain = make(path, prefix_cache=False, **fields)
    engine = make(path, prefix_states=states, **fields)
    prompts = conversations()
    expected = run(plain, prompts)
    check(model, prompts, [[answer] for answer in expected])
    assert plain.config.state_slots == 64 == engine.config.state_slots - states
    for _ in range(2):
        poison(engine)
        same(run(engine, prompts), expected)
        assert 0 < len(kept_states(engine)) <= states
    for prompt, answer in zip(prompts, expected, strict=True):
        same(run(engine, [prompt]), [answer])
        hit = (len(prompt) - 1) // PAGE * PAGE
        assert spent(engine, [prompt]) == (len(prompt) - hit + DECODED, hit)
    assert engine.stats.prefix_hit_tokens > sum(map(len, prompts))
    assert plain.stats.prefix_hit_tokens == 0
    check_idle(engine)


def test_shared_beginning_is_hit_from_the_third_prompt_on(tiny_path: Path) -> None:
    """Run three prompts: the first leaves pages, the second states where it differs."""
    engine, plain = make(tiny_path), make(tiny_path, prefix_cache=False)
    (base,) = random_prompts((43,))
    hits = []
    for tail in random_prompts((9, 9, 9), seed=4):
        same(run(plain, [base + tail]), run(engine, [base + tail]))
        hits.append(engine.stats.prefix_hit_tokens)
    assert hits == [0, 0, 40]


def test_least_recently_used_states_are_evicted_first(tiny_path: Path) -> None:
    engine = make(tiny_path, prefix_states=2)
    first, second, third = ([prompt] for prompt in random_prompts((30, 30, 30)))
    for prompts, hit in ((first, 0), (second, 0), (first, 28), (third, 0), (first, 28)):
        assert spent(engine, prompts)[1] == hit
    assert spent(engine, second)[1] == 0


def test_states_of_running_requests_are_not_evicted(tiny_path: Path) -> None:
    """Run four requests, only one of which can cache its prompt; cached pages are evicted first."""
    engine = make(tiny_path, prefix_states=1, max_running=4, kv_tokens=160)
    prompts = random_prompts((30, 31, 32, 33))
    run(engine, prompts)
    assert len(kept_states(engine)) == 1 and engine.scheduler.preemptions == 0
    run(engine, random_prompts((150,), seed=2))
    assert spent(engine, prompts[:1])[1] == 0
    check_idle(engine)


# ---------------------------------------------------------------- weights, sleep and failures


def change_nothing(engine: Engine, path: Path) -> None: ...


def nap(engine: Engine, path: Path) -> None:
    engine.sleep(unfinished="recompute")
    assert engine.blocks.available_pages == engine.blocks.total_pages
    assert not kept_states(engine)
    engine.wake_up()


@pytest.mark.parametrize(("event", "kept"), [(change_nothing, True), (nap, False)])
@pytest.mark.parametrize("at", some(1, 3, 6, whole=[2, 4]))
def test_answers_stay_the_same_when_the_cache_is_lost_under_requests(
    tiny_path: Path, event: Callable[[Engine, Path], None], kept: bool, at: int
) -> None:
    """Raise the event while one prompt is a hit, or while both are in prefill or decode."""
    engine, prompts = make(tiny_path, max_prefill_tokens=16), random_prompts((30, 50))
    before = run(make(tiny_path, prefix_cache=False), prompts)
    run(engine, [prompts[0][:17]])
    steps = iter(range(1, 100))

    def meddle(*_: int) -> None:
        if next(steps) == at:
            event(engine, tiny_path)
        poison(engine)
        engine.check_integrity()

    out = engine.generate(prompts, GREEDY, on_progress=meddle)
    same([samples[0] for samples in out], before)
    assert engine.stats.prefix_hit_tokens >= 16
    assert (spent(engine, prompts)[1] == 28 + 48) or not kept
    check_idle(engine)


def test_random_workload_is_answered_with_the_current_weights(saved: Saved, device: str) -> None:
    """Run a workload with shared beginnings, a small pool, few states, sleeps and new weights.

    Unused slots and states are filled with NaN, and integrity is checked, after every step.
    """
    rng = random.Random(7)
    sizes = {"kv_tokens": 160, "max_running": 5, "max_prefill_tokens": 24, "prefix_states": 3}
    engine = make(saved("qwen3_next")[0], device=device, **sizes)
    roots = random_prompts((40, 60, 25))

    def look(*_: int) -> None:
        engine.check_integrity()
        poison(engine)

    for seed in range(3):
        path, model = saved("qwen3_next", seed=seed)
        engine.load(path)
        for _ in range(2):
            prompts, params = random_groups(rng, roots)
            check(model, prompts, engine.generate(prompts, params, on_progress=look))
            if rng.random() < 0.3:
                engine.sleep()
                engine.wake_up()
    stats = engine.stats
    assert min(stats.preempted_recompute, stats.prefix_hit_tokens) > 0, stats
    check_idle(engine)


@pytest.mark.parametrize("depth", [0, 1])
def test_release_that_fails_on_the_device_leaves_no_page_locked(
    depth: int, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step fails, and is repeated, with any step that was launched since."""
    engine = make(tiny_path)
    engine.steps.depth = depth
    expected, release = run(engine, conversations()), engine.prefixes.blocks.release

    def once(handle: ReqHandle) -> None:
        monkeypatch.undo()
        release(handle)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(engine.prefixes.blocks, "release", once)
    same(run(engine, conversations()), expected)
    assert engine.prefixes.blocks.release == release
    check_idle(engine)
