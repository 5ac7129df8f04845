"""The engine's prefix cache, with and without tiers.

Answers stay the same for less work, older weights are never used, and no page or lock is lost.
"""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcache.tiers import WritePolicy
from rollout import DoubleSparsity, Engine, SamplingParams, WeightUpdateError
from tests.helpers.case_selection import some
from tests.helpers.models import MLA
from tests.helpers.rollout.answers import (
    GREEDY,
    assert_same,
    check,
    firsts,
    random_groups,
    random_prompts,
    run,
    spent,
)
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.tiers import PAGE, conversations, lose_device, make, swap_if, tiered
from tests.helpers.rollout.updates import tiny, update, write

POLICIES = get_args(WritePolicy)
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "auto"),
    ("qwen3", {"head_dim": 16}, "auto"),
    ("deepseek_v2", MLA, "auto"),
    ("llama", {"head_dim": 16}, "fp8_e4m3"),
    ("llama", {"head_dim": 16}, "fp4_e2m1"),
]
LLAMA, QWEN, LATENT, FP8, FP4 = MODELS
CASES: list[tuple[Any, ...]] = some(
    (LLAMA, None, 64),
    (FP8, POLICIES[0], 2),
    (LATENT, POLICIES[1], 5),
    (FP4, POLICIES[2], 2),
    whole=[
        *((model, None, 64) for model in (QWEN, LATENT, FP8, FP4)),
        *product(MODELS, POLICIES, [2, 5]),
    ],
)
KINDS: list[Callable[..., Engine]] = [make, tiered]


@pytest.mark.parametrize(("model", "policy", "running"), CASES)
def test_answers_with_and_without_prefix_cache_are_equal(
    saved: Saved,
    model: tuple[str, dict[str, Any], str],
    policy: WritePolicy | None,
    running: int,
    device: str,
) -> None:
    """Repeat prompts in batches and alone, so that nearly all of their tokens are hits.

    With tiers, most hits are below the device.
    """
    kind, overrides, dtype = model
    path, _ = saved(kind, **overrides)
    fields: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "max_prefill_tokens": 24,
        "max_running": running,
    }
    plain = make(path, prefix_cache=False, device=device, **fields)
    if policy is None:
        engine = make(path, device=device, **fields)
    else:
        engine = tiered(path, device=device, write_policy=policy, engine=fields)
    prompts = conversations()
    expected = run(plain, prompts)
    for _ in range(2):
        # These prompts evict all pages of `prompts` from the device.
        for alone in random_prompts((100, 90), seed=5) if policy else ():
            run(engine, [alone])
        assert_same(run(engine, prompts), expected)
    before = engine.stats.prefix_hit_tokens
    alone = [run(engine, [prompt])[0] for prompt in prompts]
    assert_same(alone, expected)
    hits = engine.stats.prefix_hit_tokens - before
    assert sum(answer.cached_tokens for answer in alone) == hits > 100
    assert engine.stats.prefix_hit_tokens > 2 * sum(len(prompt) - PAGE for prompt in prompts)
    assert (engine.stats.loaded_tokens > 60) == (policy is not None)
    assert plain.stats.prefix_hit_tokens == 0


# ---------------------------------------------------------------- computed tokens


@pytest.mark.parametrize(("length", "left"), [(40, 4), (41, 1), (43, 3), (1, 1), (4, 4)])
def test_repeated_prompt_computes_its_last_tokens_only(path: Path, length: int, left: int) -> None:
    engine = make(path)
    prompts = random_prompts((length,))
    decoded = GREEDY.max_tokens - 1
    assert spent(engine, prompts) == (length + decoded, 0)
    assert spent(engine, prompts) == (left + decoded, length - left)


@pytest.mark.parametrize("length", [20, 21, 22, 23])
def test_next_turn_of_a_conversation_hits_prompt_and_answer(path: Path, length: int) -> None:
    engine = make(path)
    (prompt, more) = random_prompts((length, 10))
    for _ in range(2):
        (answer,) = run(engine, [prompt])
        known = len(prompt) + len(answer.token_ids) - 1  # the last token's keys are not computed
        prompt = prompt + answer.token_ids + more
        computed, hit = spent(engine, [prompt])
        assert hit == known // PAGE * PAGE
        assert computed == len(prompt) - hit + GREEDY.max_tokens - 1
    check(tiny(0), [prompt], [run(engine, [prompt])])


def test_samples_of_one_group_fork_and_later_groups_hit(path: Path) -> None:
    engine = make(path, max_running=4)
    (prompt,) = random_prompts((42,))
    params = SamplingParams(max_tokens=8, temperature=1.0, n=9, seed=3)
    computed, hit = spent(engine, [prompt], params)  # groups of 4, 4 and 1
    assert (computed, hit) == (42 + 2 + 2 + 9 * 7, 80)
    plain = make(path, max_running=4, prefix_cache=False)
    assert_same(engine.generate([prompt], params)[0], plain.generate([prompt], params)[0])


@pytest.mark.parametrize(
    ("kind", "overrides", "fields"),
    [
        ("mistral", {"sliding_window": 8, "head_dim": 16}, {}),
        ("ministral", {"sliding_window": 8, "head_dim": 16}, {}),
        ("qwen3_next", {}, {"prefix_states": 0}),
        (
            "llama",
            {"head_dim": 16},
            {"double_sparsity": DoubleSparsity(heavy_channel_num=4, heavy_token_num=16)},
        ),
    ],
)
def test_cache_is_off_and_tiers_are_refused_when_pages_are_not_the_whole_sequence(
    saved: Saved, kind: str, overrides: dict[str, Any], fields: dict[str, Any]
) -> None:
    path, _ = saved(kind, **overrides)
    engine, prompts = make(path, **fields), random_prompts((30,))
    assert spent(engine, prompts) == spent(engine, prompts) == (30 + 7, 0)
    with pytest.raises(ValueError, match="tiers need full or latent attention in every layer"):
        tiered(path, engine=fields)


# ---------------------------------------------------------------- weights and sleep


@pytest.mark.parametrize("policy", POLICIES)
def test_prefixes_on_the_host_are_hit_after_a_sleep(
    path: Path, policy: WritePolicy, device: str
) -> None:
    engine = tiered(path, device=device, kv_tokens=512, write_policy=policy)
    prompts = conversations()
    before = run(engine, prompts)
    for tags in (["kv_cache"], None):
        engine.sleep(tags=tags)
        engine.sleep()  # without effect for tags that sleep already
        assert engine.blocks.available_pages == engine.blocks.total_pages
        engine.wake_up()
        lose_device(engine)
        loaded = engine.stats.loaded_tokens
        _, hit = spent(engine, prompts)
        assert hit >= sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
        assert engine.stats.loaded_tokens > loaded
        assert_same(run(engine, prompts), before)


@pytest.mark.parametrize(
    "how", ["no tiers", "no tiers, level 2", "told", "level 2", "updated", "loaded"]
)
def test_nothing_is_hit_after_a_sleep_that_forgets_prefixes_or_weights(
    path: Path, how: str
) -> None:
    plain, level = how.startswith("no tiers"), 2 if how.endswith("level 2") else 1
    engine = make(path) if plain else tiered(path, kv_tokens=512, keep_asleep=how != "told")
    prompts = random_prompts((50,))
    before = run(engine, prompts)
    engine.sleep(level=level)
    assert engine.blocks.available_pages == engine.blocks.total_pages
    engine.wake_up()
    if level == 2 or how == "loaded":
        engine.load(path)
    if how == "updated":
        update(engine, 1, seed=1)
    lose_device(engine)
    assert spent(engine, prompts) == (50 + 7, 0)
    if how != "updated":
        assert_same(run(engine, prompts), before)


def test_cache_stays_consistent_over_preempting_sleeps_and_poisoned_weights(path: Path) -> None:
    engine, prompts = make(path), random_prompts((30, 50))
    before = run(engine, prompts)

    def nap(done: int, total: int, generated: int) -> None:
        if generated in (4, 10):
            engine.sleep(unfinished="recompute")
            engine.check_integrity()
            assert engine.blocks.available_pages == engine.blocks.total_pages
            engine.wake_up()

    assert_same(firsts(engine.generate(prompts, GREEDY, on_progress=nap)), before)
    engine.abort_update("trainer died")
    assert all(ledger.available == ledger.total for ledger in engine.prefixes.ledgers)
    with pytest.raises(WeightUpdateError):
        engine.verify_update(write(engine.begin_update(1), seed=1, digest=1))
    engine.check_integrity()
    engine.load(path)
    assert_same(run(engine, prompts), before)


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_rows_with_other_scales_are_not_hit(saved: Saved, kind: Callable[..., Engine]) -> None:
    path, _ = saved("llama", head_dim=16)
    fields = {"kv_cache_dtype": "fp8_e4m3"}
    engine = make(path, **fields) if kind is make else tiered(path, engine=fields)
    fresh = make(path, **fields)
    prompts = random_prompts((50, 60))
    run(engine, prompts)
    for scaled in (engine, fresh):
        scaled.kv_pool.set_scales(1, 0.25, 0.03)
    if kind is tiered:
        engine.sleep()
        engine.wake_up()
    assert_same(run(engine, prompts), run(fresh, prompts))
    assert engine.stats.prefix_hit_tokens == 0
    if kind is tiered:
        run(engine, random_prompts((120,), seed=9))
    assert spent(engine, prompts)[1] == 48 + 56
    assert (engine.stats.loaded_tokens > 0) == (kind is tiered)


# ---------------------------------------------------------------- everything together


@pytest.mark.parametrize("kind", KINDS)
def test_random_workload_is_answered_with_the_current_weights(
    path: Path, tmp_path: Path, kind: Callable[..., Engine], device: str
) -> None:
    """Run a workload with shared beginnings, a small pool, sleeps and changing weights.

    With tiers, samples are preempted in both ways. Integrity is checked after every step.
    """
    rng = random.Random(7)
    fields: dict[str, Any] = {"max_running": 5, "max_prefill_tokens": 24}
    if kind is tiered:
        engine = tiered(
            path, 112, device, fields, host_ratio=2.0, disk_directory=tmp_path, disk_bytes=1 << 21
        )
        swap_if(engine, lambda: rng.random() < 0.5)
    else:
        engine = make(path, kv_tokens=160, device=device, **fields)
    roots = random_prompts((40, 60, 25))
    for version in range(1, 4):
        update(engine, version, seed=version)
        for _ in range(2):
            prompts, params = random_groups(rng, roots)
            out = run(engine, prompts, params)
            check(tiny(version), prompts, [[answer] for answer in out])
            if rng.random() < 0.3:
                engine.sleep()
                engine.wake_up()
    stats = engine.stats
    assert min(stats.preempted_recompute, stats.prefix_hit_tokens) > 0, stats
    if kind is tiered:
        assert min(stats.preempted_swap, stats.swapped_back, stats.loaded_tokens) > 0, stats
