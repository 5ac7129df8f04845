"""Tiers in the engine: the same answers with pages on host and disk and samples that are swapped, never old weights."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from kvcache.tiers import WritePolicy
from rollout import DoubleSparsity, Engine, EngineConfig, KVTiers, SamplingParams
from rollout.tiered_blocks import TieredBlocks
from tests.helpers.models import build_tiny, forward_logprobs, greedy, save_tiny
from tests.rollout.test_greedy import random_prompts
from tests.rollout.test_lifecycle import TINY, write
from tests.rollout.test_prefix_cache import MODELS, PAGE, assert_same, conversations, make, path, run, spent

__all__ = ["path"]  # a fixture
POLICIES = get_args(WritePolicy)
LONG = SamplingParams(max_tokens=40, temperature=0)
CROWD = (20, 25, 30, 16, 23)


def tiered(
    path: Path, kv_tokens: int = 128, device: str = "cpu", engine: dict[str, Any] | None = None, **tiers: Any
) -> Engine:
    """An engine with a small pool and a host that has room for all, unless told otherwise."""
    fields = {"host_ratio": 8.0} | tiers if "host_bytes" not in tiers else tiers
    return make(path, kv_tokens=kv_tokens, device=device, tiers=KVTiers(**fields), **(engine or {}))


def blocks_of(engine: Engine) -> TieredBlocks:
    assert isinstance(engine._prefixes, TieredBlocks)
    return engine._prefixes


def poison(engine: Engine) -> None:
    """What a pause and a resume may leave, but for page 0."""
    for part in engine.kv_pool.stored.values():  # type: ignore[attr-defined]
        part[:, PAGE:].view(torch.uint8).fill_(255)


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


# ---------------------------------------------------------------- preemption


def crowd() -> list[list[int]]:
    return random_prompts(CROWD, seed=4)


@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=40, temperature=1.3, top_p=0.9, seed=11)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", ["recompute", "swap", "both"])
def test_preempted_samples_answer_as_if_nothing_had_happened(
    path: Path, params: SamplingParams, n: int, way: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**{**params.__dict__, "n": n})
    engine = tiered(path, device=device, kv_tokens=104, preemption="recompute" if way == "both" else way)
    if way == "both":
        turns = itertools.cycle([True, False])
        monkeypatch.setattr(blocks_of(engine).cost, "swaps", lambda victim: next(turns))
    plain = make(path, device=device, prefix_cache=False, kv_tokens=2048)
    out = engine.generate(crowd(), params, on_progress=lambda *_: engine.check_integrity())
    expected = plain.generate(crowd(), params)
    for mine, its in zip(out, expected, strict=True):
        assert_same(mine, its)
    stats = engine.stats
    assert (stats.preempted_swap > 0) == (way != "recompute")
    assert (stats.preempted_recompute > 0) == (way != "swap")
    assert stats.preempted_swap + stats.preempted_recompute == engine._scheduler.preemptions
    assert plain._scheduler.preemptions == 0


def test_a_swapped_sample_goes_on_where_it_was(path: Path) -> None:
    """The model sees every token once, as without preemption."""
    engine, plain = tiered(path, kv_tokens=96, preemption="swap"), make(path, prefix_cache=False, kv_tokens=1024)
    assert_same(run(engine, crowd(), LONG), run(plain, crowd(), LONG))
    assert engine.stats.preempted_swap == engine.stats.swapped_back > 0
    assert engine.stats.computed_tokens == plain.stats.computed_tokens


def test_a_host_without_room_means_recompute(path: Path) -> None:
    engine = tiered(path, kv_tokens=96, preemption="swap", host_bytes=2 * PAGE * 2 * 2 * 2 * 16 * 4)  # two pages
    plain = make(path, prefix_cache=False, kv_tokens=1024)
    assert_same(run(engine, crowd(), LONG), run(plain, crowd(), LONG))
    assert engine.stats.preempted_recompute > 0


def test_what_the_host_drops_while_a_sample_waits_is_computed_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, plain = tiered(path, kv_tokens=96, preemption="swap"), make(path, prefix_cache=False, kv_tokens=1024)
    caplog.set_level(logging.INFO, logger="rollout")

    def drop(*_: int) -> None:
        if any(sample.swapped for sample in engine._scheduler.waiting):
            blocks_of(engine).tiers.lower.clear()
            blocks_of(engine).tiers.evict(10**6)
        engine.check_integrity()

    out = engine.generate(crowd(), LONG, on_progress=drop)
    assert_same([samples[0] for samples in out], run(plain, crowd(), LONG))
    assert engine.stats.swapped_back < engine.stats.preempted_swap
    assert "pages that the tiers had to drop" in caplog.text


def test_the_rates_are_those_of_the_engines_own_steps_and_copies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered(path, engine={"max_prefill_tokens": 128})
    seen: list[tuple[Any, ...]] = []
    cost = blocks_of(engine).cost
    monkeypatch.setattr(cost, "copied", lambda *what: seen.append(what))
    before = cost.rates["prefill"].value
    for prompt in random_prompts((100, 100, 100)) * 2:
        run(engine, [prompt])
    per_token = engine.kv_pool.bytes_per_token
    out = sum(nbytes for to_host, nbytes, _ in seen if to_host)
    back = sum(nbytes for to_host, nbytes, _ in seen if not to_host)
    assert back == engine.stats.loaded_tokens * per_token > 0
    assert out >= 3 * 100 * per_token and all(seconds > 0 for *_, seconds in seen)
    assert cost.rates["prefill"].value != before


# ---------------------------------------------------------------- weights and sleep


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_prefixes_survive_a_sleep_of_the_pool(path: Path, policy: WritePolicy, device: str) -> None:
    engine = tiered(path, device=device, kv_tokens=512, write_policy=policy)
    prompts = conversations()
    before = run(engine, prompts)
    for tags in (["kv_cache"], None):
        engine.sleep(tags=tags)
        engine.sleep()  # asleep already
        assert engine._blocks.available_pages == engine._blocks.total_pages
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
        engine.commit_update(write(engine.begin_update(1), seed=1))
    poison(engine)
    assert spent(engine, prompts) == (50 + 7, 0)


def test_samples_that_wait_swapped_over_a_sleep(path: Path) -> None:
    engine, plain = tiered(path, kv_tokens=96, preemption="swap"), make(path, prefix_cache=False, kv_tokens=1024)
    naps = 0

    def nap(*_: int) -> None:
        nonlocal naps
        if any(sample.swapped for sample in engine._scheduler.waiting):
            naps += 1
            engine.sleep(unfinished="preempt")
            engine.check_integrity()
            engine.wake_up()
            poison(engine)

    out = engine.generate(crowd(), LONG, on_progress=nap)
    assert_same([samples[0] for samples in out], run(plain, crowd(), LONG))
    assert naps > 0 and engine.stats.swapped_back > 0
    engine.check_integrity()


def test_samples_that_wait_swapped_while_weights_change_begin_anew(path: Path) -> None:
    """What is swapped in under the new weights was made by them: a fresh engine that is given the beginnings of the
    answers goes on with the same tokens."""
    engine = tiered(path, kv_tokens=96, preemption="swap")
    changed: dict[int, int] = {}

    def change(*_: int) -> None:
        waiting = [sample for sample in engine._scheduler.waiting if sample.swapped]
        if waiting and not changed:
            changed.update({sample.request: len(sample.output) for sample in waiting})
            for sample in engine._scheduler.running:
                sample.params = SamplingParams(max_tokens=len(sample.output) + 1, temperature=0)
            engine.sleep(unfinished="preempt")
            engine.wake_up()
            engine.commit_update(write(engine.begin_update(1), seed=1))
        engine.check_integrity()

    out = engine.generate(crowd(), LONG, on_progress=change)
    assert changed
    model = build_tiny("qwen3", seed=1, **TINY)
    for index, at in changed.items():
        answer = out[index][0]
        assert answer.weight_versions == [0] * at + [1] * (40 - at)
        assert answer.token_ids[at:] == greedy(model, crowd()[index] + answer.token_ids[:at], 40 - at)


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
            each.commit_update(write(each.begin_update(version), seed=version))
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


# ---------------------------------------------------------------- faults


def full(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def with_disk(path: Path, directory: Path) -> Engine:
    return tiered(path, host_ratio=1.0, disk_directory=directory, disk_bytes=1 << 24)


@pytest.mark.parametrize("fault", ["torn", "foreign", "gone", "full"])
def test_a_faulty_disk_costs_computing_and_is_logged(
    path: Path, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = with_disk(path, tmp_path), make(path, prefix_cache=False)
    prompts = random_prompts((80, 100, 100, 100), seed=3)
    if fault == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)
    for prompt in prompts:
        run(engine, [prompt])
    files = sorted(tmp_path.glob("*.kvpage"))
    assert bool(files) == (fault != "full")
    others = {each: files[i - 1].read_bytes() for i, each in enumerate(files)}
    for each in files:
        if fault == "torn":
            os.truncate(each, 4096)
        elif fault == "foreign":
            each.write_bytes(others[each])  # a whole page, of other tokens
        elif fault == "gone":
            each.unlink()
    for prompt in prompts:
        assert_same(run(engine, [prompt]), run(plain, [prompt]))
    reasons = {
        "torn": "the file ends too early",
        "foreign": "key or checksum differ",
        "gone": "ENOENT",
        "full": "ENOSPC",
    }
    assert reasons[fault] in caplog.text and "will be computed again" in caplog.text


def test_a_directory_that_another_engine_left_is_not_believed(path: Path, tmp_path: Path) -> None:
    prompts = random_prompts((80, 100, 100, 100), seed=3)
    first = with_disk(path, tmp_path)
    for prompt in prompts:
        run(first, [prompt])
    left = set(tmp_path.glob("*.kvpage"))
    assert left
    with pytest.raises(RuntimeError, match="is held by another disk tier"):
        with_disk(path, tmp_path)
    disk = blocks_of(first).tiers.lower.disk
    assert disk is not None
    disk.close()
    second = with_disk(path, tmp_path)
    assert not left & set(tmp_path.glob("*.kvpage"))
    assert spent(second, prompts[:1]) == (80 + 7, 0)


@pytest.mark.parametrize("what", ["forward", "sample"])
def test_a_failing_step_leaves_nothing_behind(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = tiered(path, 96, preemption="swap"), make(path, prefix_cache=False, kv_tokens=1024)
    expected = run(plain, crowd(), LONG)
    for at in (1, 20, 35, 50):
        steps = iter(range(at))
        right = getattr(engine._runner, what)

        def fail(*args: Any, steps: Any = steps, right: Any = right) -> Any:
            if next(steps, None) is None:
                raise ZeroDivisionError
            return right(*args)

        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(engine._runner, what, fail)
            engine.generate(crowd(), LONG)
        engine.check_integrity()
        assert blocks_of(engine).swapped_pages() == 0
        assert blocks_of(engine).tiers.protected_size == 0
    assert engine.stats.preempted_swap > 0
    assert_same(run(engine, crowd(), LONG), expected)


@pytest.mark.parametrize(
    ("method", "copy"), [("store_private", "backup_from_device_all_layer"), ("load_private", "load_to_device")]
)
def test_a_swap_that_fails_ends_the_call_only(
    path: Path, method: str, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = tiered(path, 96, preemption="swap"), make(path, prefix_cache=False, kv_tokens=1024)
    tiers = blocks_of(engine).tiers
    right = getattr(tiers, method)

    def failing(*args: Any) -> Any:
        with monkeypatch.context() as inner:
            inner.setattr(tiers.lower.host, copy, out_of_memory)
            return right(*args)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(tiers, method, failing)
        engine.generate(crowd(), LONG)
    engine.check_integrity()
    assert_same(run(engine, crowd(), LONG), run(plain, crowd(), LONG))


def test_copies_to_the_host_that_fail_cost_nothing_but_themselves(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, plain = tiered(path), make(path, prefix_cache=False)
    prompts = random_prompts((80, 100, 100, 100), seed=3)
    monkeypatch.setattr(blocks_of(engine).tiers.lower.host, "backup_from_device_all_layer", out_of_memory)
    for prompt in prompts * 2:
        assert_same(run(engine, [prompt]), run(plain, [prompt]))
    assert "not kept below the device: no room" in caplog.text and engine.stats.loaded_tokens == 0


def out_of_memory(*arguments: object) -> Any:
    raise torch.OutOfMemoryError("no room")


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
