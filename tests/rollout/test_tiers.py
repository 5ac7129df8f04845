"""Tiers in the engine: the same answers with pages on host and disk, over sleep, and never of old weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from kvcache.tiers import WritePolicy
from rollout import DoubleSparsity, EngineConfig, KVTiers, SamplingParams
from tests.helpers.models import forward_logprobs, greedy, save_tiny
from tests.helpers.tiers import blocks_of, poison, tiered
from tests.rollout.test_greedy import random_prompts
from tests.rollout.test_lifecycle import update
from tests.rollout.test_prefix_cache import MODELS, PAGE, assert_same, conversations, make, path, run, spent

__all__ = ["path"]  # a fixture
POLICIES = get_args(WritePolicy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "overrides", "dtype"), MODELS)
def test_answers_are_those_without_tiers(
    tmp_path: Path, kind: str, overrides: dict[str, Any], dtype: str, policy: WritePolicy, device: str
) -> None:
    """Three times over, with most of every prompt found below the device."""
    model = save_tiny(tmp_path / "model", kind, **overrides)
    fields: dict[str, Any] = {"kv_cache_dtype": dtype, "max_prefill_tokens": 24, "max_running": 2}
    engine = tiered(tmp_path / "model", device=device, write_policy=policy, engine=fields)
    prompts = conversations()
    expected = run(make(tmp_path / "model", prefix_cache=False, device=device, **fields), prompts)
    for _ in range(3):
        for alone in random_prompts((100, 90), seed=5):  # nothing of the prompts stays on the device
            run(engine, [alone])
        assert_same(run(engine, prompts), expected)
    assert engine.stats.loaded_tokens > 60
    if dtype == "auto":
        for prompt, answer in zip(prompts, expected, strict=True):
            assert answer.token_ids == greedy(model, prompt, 8)
            gap = torch.tensor(answer.logprobs) - forward_logprobs(model, prompt, answer.token_ids)
            assert gap.abs().max() <= 5e-5


@pytest.mark.parametrize("disk", [True, False])
def test_what_left_the_device_is_found_below_and_not_computed(path: Path, tmp_path: Path, disk: bool) -> None:
    extra: dict[str, Any] = {"host_ratio": 1.0, "disk_directory": tmp_path, "disk_bytes": 1 << 24} if disk else {}
    engine = tiered(path, **extra)
    prompt, *others = random_prompts((80, 100, 100, 100), seed=3)
    assert spent(engine, [prompt]) == (80 + 7, 0)
    for other in others:
        run(engine, [other])
    assert bool(list(tmp_path.glob("*.kvpage"))) == disk
    assert engine.stats.loaded_tokens == 0
    assert spent(engine, [prompt]) == (4 + 7, 76)
    assert engine.stats.loaded_tokens == 76
    assert spent(engine, [prompt]) == (4 + 7, 76)
    assert engine.stats.loaded_tokens == 76, "it was on the device again"


# ---------------------------------------------------------------- weights and sleep


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_prefixes_survive_a_sleep_of_the_pool(path: Path, policy: WritePolicy, device: str) -> None:
    engine = tiered(path, device=device, kv_tokens=512, write_policy=policy)
    prompts = conversations()
    before = run(engine, prompts)
    for tags in (["kv_cache"], None):
        engine.sleep(tags=tags)
        engine.sleep()  # asleep already
        assert engine.blocks.available_pages == engine.blocks.total_pages
        engine.wake_up()
        poison(engine)
        loaded = engine.stats.loaded_tokens
        _, hit = spent(engine, prompts)
        assert hit >= sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
        assert engine.stats.loaded_tokens > loaded
        assert_same(run(engine, prompts), before)


@pytest.mark.parametrize("how", ["told", "level 2", "updated"])
def test_a_sleep_after_which_nothing_is_hit(path: Path, how: str) -> None:
    engine = tiered(path, kv_tokens=512, keep_asleep=how != "told")
    prompts = random_prompts((50,))
    run(engine, prompts)
    engine.sleep(level=2 if how == "level 2" else 1)
    engine.wake_up()
    if how == "level 2":
        engine.load(path)
    if how == "updated":
        update(engine, 1, seed=1)
    poison(engine)
    assert spent(engine, prompts) == (50 + 7, 0)


def test_weights_raised_at_every_round_of_random_work(path: Path, tmp_path: Path, device: str) -> None:
    """Groups over a few beginnings, all tiers, both ways of preemption; each answer is that of its own weights."""
    rng = random.Random(7)
    fields: dict[str, Any] = {"max_running": 5, "max_prefill_tokens": 24}
    engine = tiered(path, 112, device, fields, host_ratio=2.0, disk_directory=tmp_path, disk_bytes=1 << 21)
    blocks_of(engine).cost.swaps = lambda victim: rng.random() < 0.5  # type: ignore[method-assign]
    plain = make(path, kv_tokens=1024, max_running=5, prefix_cache=False, device=device)
    roots = random_prompts((40, 60, 25))
    for version in range(1, 9):
        for each in (engine, plain):
            update(each, version, seed=version)
        for _ in range(2):
            prompts = [
                rng.choice(roots)[: rng.randrange(1, 61)] + [rng.randrange(199) for _ in range(rng.randrange(1, 9))]
                for _ in range(rng.randrange(2, 7))
            ]
            params = SamplingParams(max_tokens=rng.randrange(10, 35), temperature=0, n=rng.randrange(1, 4))
            assert_same(run(engine, prompts, params), run(plain, prompts, params))
    stats = engine.stats
    assert min(stats.preempted_swap, stats.preempted_recompute, stats.swapped_back, stats.loaded_tokens) > 0, stats


def test_fp8_rows_of_other_scales_are_not_hit(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", head_dim=16)
    engine = tiered(tmp_path, engine={"kv_cache_dtype": "fp8_e4m3"})
    fresh = make(tmp_path, kv_cache_dtype="fp8_e4m3")
    prompts = random_prompts((50, 60))
    run(engine, prompts)
    for each in (engine, fresh):
        each.kv_pool.set_scales(1, 0.25, 0.03)
    engine.sleep()
    engine.wake_up()
    assert_same(run(engine, prompts), run(fresh, prompts))
    assert engine.stats.prefix_hit_tokens == 0
    run(engine, random_prompts((120,), seed=9))
    assert spent(engine, prompts)[1] == 48 + 56 and engine.stats.loaded_tokens > 0


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either ratio or size_bytes"),
        ({"host_ratio": 1.0, "host_bytes": 4}, "give either ratio or size_bytes"),
        ({"host_ratio": 1.0, "write_policy": "never"}, "no write policy 'never'"),
        ({"host_ratio": 1.0, "preemption": "never"}, "preemption='never' must be one of"),
        ({"host_ratio": 1.0, "disk_bytes": 5}, "give disk_directory and disk_bytes together"),
        ({"host_ratio": 1.0, "layout": "random"}, "no layout 'random'"),
    ],
)
def test_what_is_wrong_is_said_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVTiers(**fields)


def test_tiers_need_a_prefix_cache(path: Path) -> None:
    with pytest.raises(ValueError, match="tiers are part of the prefix cache"):
        EngineConfig(tiers=KVTiers(host_ratio=1.0), prefix_cache=False)
    with pytest.raises(ValueError, match="hold no page"):
        tiered(path, host_bytes=100)


@pytest.mark.parametrize(
    ("kind", "overrides", "fields"),
    [
        ("mistral", {"sliding_window": 8, "head_dim": 16}, {}),
        ("qwen3_next", {}, {}),
        ("llama", {"head_dim": 16}, {"double_sparsity": DoubleSparsity(heavy_channel_num=4, heavy_token_num=16)}),
    ],
)
def test_refused_where_pages_do_not_tell_all(
    tmp_path: Path, kind: str, overrides: dict[str, Any], fields: dict[str, Any]
) -> None:
    save_tiny(tmp_path, kind, **overrides)
    with pytest.raises(ValueError, match="tiers need full or latent attention in every layer"):
        tiered(tmp_path, engine=fields)
