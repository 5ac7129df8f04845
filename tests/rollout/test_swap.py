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

from kvcache.tiers import HostKVCache
from rollout import Completion, Engine, Output, SamplingParams
from rollout.engine.stepping import joined
from tests.helpers.case_selection import pairwise
from tests.helpers.models import greedy
from tests.helpers.rollout.answers import assert_same, check, random_prompts, run
from tests.helpers.rollout.tiers import blocks_of, failing, lose_device, make, swap_if, tiered
from tests.helpers.rollout.updates import greedy_over_old_keys, tiny, update

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


def finish(engine: Engine) -> list[list[Completion]]:
    """Return what is told of each request from now on, to its end, in the order of requests."""
    outputs: list[Output] = []
    while engine.unfinished:
        outputs += engine.step()
        engine.check_integrity()
    return joined(outputs)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_that_keeps_requests_computes_no_token_twice(
    path: Path, device: str, level: int
) -> None:
    """Sleep in several states of five requests with siblings: in prompts, before and after forks.

    Their weights come back, as a new version where the sleep discards them.
    """
    engine = tiered(path, device=device, kv_tokens=512, engine={"max_prefill_tokens": 16})
    params = replace(LONG, n=2)
    plain = make(path, device=device, prefix_cache=False, kv_tokens=2048)
    for prompt in crowd():
        engine.submit(prompt, params, stream=False)
    for version in range(1, 5):
        for _ in range(4):
            engine.step()
        running = len(engine.scheduler.running)
        engine.sleep(level, unfinished="keep")
        assert not engine.scheduler.running and engine.report().committed_bytes == 0
        engine.wake_up()
        lose_device(engine)
        if level == 2:
            update(engine, version, seed=0)
        engine.check_integrity()
        assert engine.stats.preempted_swap >= running
    for ends, expected in zip(finish(engine), plain.generate(crowd(), params), strict=True):
        assert_same(ends, expected)
    assert engine.stats.preempted_recompute == 0
    assert engine.stats.preempted_swap == engine.stats.swapped_back > 0
    once = sum(CROWD) + 2 * len(CROWD) * (LONG.max_tokens - 1)
    assert engine.stats.computed_tokens == once
    assert blocks_of(engine).swapped_pages() == 0


@pytest.mark.parametrize("how", ["refuse", "keep", "recompute"])
def test_parked_request_goes_on_over_its_keys_under_new_weights(path: Path, how: str) -> None:
    """Nobody else uses them; with "recompute", an update lets it compute them again."""
    engine, (prompt, *_) = tiered(path, kv_tokens=512), crowd()
    engine.submit(prompt, LONG)
    first: list[int] = []
    while len(first) < 6:
        first += [token for output in engine.step() for token in output.token_ids]
    engine.sleep(2, unfinished="keep")
    engine.wake_up()
    lose_device(engine)
    update(engine, 1, seed=1, in_flight=how)
    before = engine.stats.computed_tokens
    ((last,),) = finish(engine)
    count = LONG.max_tokens - len(first)
    assert last.weight_versions == [1] * count
    prefilled = len(prompt) + len(first) if how == "recompute" else 1
    assert engine.stats.computed_tokens - before == prefilled + count - 1
    if how == "recompute":
        assert last.token_ids == greedy(tiny(1), prompt + first, count)
    else:
        seeds = [0] * len(first) + [1] * count
        assert first + last.token_ids == greedy_over_old_keys(prompt, seeds)
    again = engine.generate([prompt, prompt + first + last.token_ids], replace(LONG, max_tokens=4))
    for asked, (answer,) in zip((prompt, prompt + first + last.token_ids), again, strict=True):
        assert answer.token_ids == greedy(tiny(1), asked, 4)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_parked_siblings_share_their_prompt_on_the_host(
    path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied once, at the prefill or before the sleep, and serves all, after a sync, too."""
    engine, copied = tiered(path, kv_tokens=512, write_policy=policy), list[int]()
    (prompt,) = random_prompts((70,))
    backup = HostKVCache.backup_from_device_all_layer

    def counted(host: HostKVCache, rows: Any, slots: Any) -> Any:
        copied.append(len(slots))
        return backup(host, rows, slots)

    monkeypatch.setattr(HostKVCache, "backup_from_device_all_layer", counted)
    engine.submit(prompt, replace(LONG, n=4))
    for _ in range(8):
        engine.step()
    pages, computed = blocks_of(engine).tiers.page_size, engine.scheduler.running[0].length - 1
    copied.clear()
    engine.sleep(2, unfinished="keep")
    there = len(prompt) // pages * pages if policy == "write_through" else 0
    whole = computed // pages * pages  # of prompt and answers, which are equal
    assert sum(copied) == whole - there + 4 * (computed - whole)
    engine.wake_up()
    lose_device(engine)
    update(engine, 1, seed=1, in_flight="keep")
    before = engine.stats.computed_tokens
    (answers,) = finish(engine)
    assert engine.stats.computed_tokens - before == 4 * (
        len(prompt) + LONG.max_tokens - 1 - computed
    )
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert blocks_of(engine).swapped_pages() == 0


def test_requests_without_room_on_the_host_or_without_tiers_are_computed_again(path: Path) -> None:
    host_bytes = 2 * 4 * 2 * 2 * 2 * 16 * 12  # twelve pages
    small = tiered(path, kv_tokens=512, host_bytes=host_bytes)
    for engine in (small, make(path)):
        for prompt in crowd():
            engine.submit(prompt, LONG, stream=False)
        for _ in range(4):
            engine.step()
        engine.sleep(unfinished="keep")
        engine.wake_up()
        check(tiny(0), crowd(), finish(engine))
        assert engine.stats.preempted_recompute > 0
        assert (engine.stats.swapped_back > 0) == (engine is small)


def test_parked_bytes_of_other_scales_are_no_prefix(path: Path) -> None:
    """Scales that changed before the sleep make what was computed a miss, on the host, too."""
    (prompt,) = random_prompts((70,))
    fields: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
    engine = tiered(path, kv_tokens=512, engine=fields, write_policy="write_back")
    engine.submit(prompt, LONG)
    for _ in range(6):
        engine.step()
    engine.kv_pool.set_scales(1, 0.25, 0.03)
    engine.sleep(unfinished="keep")
    hits = engine.stats.prefix_hit_tokens
    engine.wake_up()
    for id in engine.unfinished:
        engine.abort(id)
    finish(engine)
    run(engine, [prompt], LONG)
    assert engine.stats.prefix_hit_tokens == hits, "bytes of other scales were found"


def test_sleep_that_fails_on_the_host_leaves_no_pages_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiered(path, kv_tokens=512)
    for prompt in crowd():
        engine.submit(prompt, LONG, stream=False)
    for _ in range(4):
        engine.step()
    with failing(blocks_of(engine).tiers, "store_private", 1, monkeypatch):
        engine.sleep(unfinished="keep")
    blocks_of(engine).tiers.check_integrity()
    waiting = [sample.swapped for sample in engine.scheduler.waiting if sample.swapped]
    assert blocks_of(engine).swapped_pages() == sum(len(swapped.pages) for swapped in waiting) > 0
    engine.wake_up()
    check(tiny(0), crowd(), finish(engine))


def test_parked_requests_that_end_leave_no_host_pages(path: Path) -> None:
    engine = tiered(path, kv_tokens=512)
    ids = [engine.submit(prompt, LONG) for prompt in crowd()]
    for _ in range(3):
        engine.step()
    engine.sleep(unfinished="keep", tags=["weights"])  # the pool stays, and what is on it
    assert len(engine.scheduler.running) == len(ids) and not blocks_of(engine).swapped_pages()
    engine.sleep(unfinished="keep")
    assert blocks_of(engine).swapped_pages() > 0
    for id in ids:
        engine.abort(id)
    engine.wake_up()
    ends = itertools.chain.from_iterable(finish(engine))
    assert {answer.finish_reason for answer in ends} == {"abort"}
    assert blocks_of(engine).swapped_pages() == 0
