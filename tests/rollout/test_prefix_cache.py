"""The prefix cache in the engine: the same answers for less work, never under older weights, no page or lock lost."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import (
    BlockManager,
    KVCacheConfig,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    ReqToTokenPool,
)
from rollout import Completion, DoubleSparsity, Engine, SamplingParams, WeightUpdateError
from rollout.prefix import PrefixBlocks
from tests.helpers.models import MLA, build_tiny, forward_logprobs, greedy, save_tiny
from tests.rollout.test_greedy import random_prompts
from tests.rollout.test_lifecycle import TINY, update, write

PAGE = 4
GREEDY = SamplingParams(max_tokens=8, temperature=0)
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "auto"),
    ("qwen3", {"head_dim": 16}, "auto"),
    ("deepseek_v2", MLA, "auto"),
    ("llama", {"head_dim": 16}, "fp8_e4m3"),
    ("llama", {"head_dim": 16}, "fp4_e2m1"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny(directory, "qwen3", **TINY)
    return directory


def make(path: Path, **fields: Any) -> Engine:
    return Engine.from_pretrained(path, **{"kv_tokens": 512, "page_size": PAGE, **fields})


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Completion]:
    """The first answer to each prompt; everything adds up after every step."""
    out = engine.generate(prompts, params, on_progress=lambda *_: engine.check_integrity())
    engine.check_integrity()
    return [samples[0] for samples in out]


def spent(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> tuple[int, int]:
    """(computed, hit) tokens of one call."""
    before = engine.stats
    run(engine, prompts, params)
    after = engine.stats
    return after.computed_tokens - before.computed_tokens, after.prefix_hit_tokens - before.prefix_hit_tokens


def conversations() -> list[list[int]]:
    """Prompts that share beginnings of 0, 30, 61 and 64 tokens, one of them twice."""
    (base,) = random_prompts((64,), seed=1)
    tails = random_prompts((5, 9, 3, 20), seed=2)
    return [base[:n] + tail for n, tail in zip((0, 30, 61, 64), tails, strict=True)] + [base, base]


def assert_same(mine: list[Completion], its: list[Completion]) -> None:
    assert [each.token_ids for each in mine] == [each.token_ids for each in its]
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=5e-5, rtol=0)


@pytest.mark.parametrize(("kind", "overrides", "dtype"), MODELS)
def test_answers_are_those_without_the_cache(
    tmp_path: Path, kind: str, overrides: dict[str, Any], dtype: str, device: str
) -> None:
    """Twice, in batches and alone; the second time nearly all of every prompt is found."""
    model = save_tiny(tmp_path, kind, **overrides)
    fields: dict[str, Any] = {"device": device, "kv_cache_dtype": dtype, "max_prefill_tokens": 24}
    engine, plain = make(tmp_path, **fields), make(tmp_path, prefix_cache=False, **fields)
    prompts = conversations()
    expected = run(plain, prompts)
    assert_same(run(engine, prompts), expected)
    assert_same(run(engine, prompts), expected)
    assert_same([run(engine, [prompt])[0] for prompt in prompts], expected)
    assert engine.stats.prefix_hit_tokens > 2 * sum(len(prompt) - PAGE for prompt in prompts)
    assert plain.stats.prefix_hit_tokens == 0
    if dtype == "auto":
        for prompt, answer in zip(prompts, expected, strict=True):
            assert answer.token_ids == greedy(model, prompt, 8)
            gap = torch.tensor(answer.logprobs) - forward_logprobs(model, prompt, answer.token_ids)
            assert gap.abs().max() <= 5e-5


@pytest.mark.parametrize(("length", "left"), [(40, 4), (41, 1), (43, 3), (1, 1), (4, 4)])
def test_a_prompt_seen_before_computes_its_last_tokens_only(path: Path, length: int, left: int) -> None:
    engine = make(path)
    prompts = random_prompts((length,))
    decoded = GREEDY.max_tokens - 1
    assert spent(engine, prompts) == (length + decoded, 0)
    assert spent(engine, prompts) == (left + decoded, length - left)


def test_the_runner_is_given_no_more_than_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(path, max_prefill_tokens=16)
    seen = []
    forward = engine.runner.forward

    def spy(step: Any) -> Any:
        seen.append(len(step.decode) + sum(chunk.length for chunk in step.chunks))
        return forward(step)

    monkeypatch.setattr(engine.runner, "forward", spy)
    for _ in range(2):
        run(engine, conversations())
    assert sum(seen) == engine.stats.computed_tokens and engine.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("length", [20, 21, 22, 23])
def test_a_turn_of_a_conversation_finds_prompt_and_answer(path: Path, length: int) -> None:
    engine = make(path)
    (prompt, more) = random_prompts((length, 10))
    for _ in range(3):
        (answer,) = run(engine, [prompt])
        known = len(prompt) + len(answer.token_ids) - 1  # the last token's keys were never computed
        prompt = prompt + answer.token_ids + more
        computed, hit = spent(engine, [prompt])
        assert hit == known // PAGE * PAGE
        assert computed == len(prompt) - hit + GREEDY.max_tokens - 1
    assert_same(run(engine, [prompt]), run(make(path, prefix_cache=False), [prompt]))


def test_prompts_of_one_call_find_what_a_step_before_computed(path: Path) -> None:
    """The second is admitted once the first, a step's worth of tokens, is in the cache."""
    engine = make(path, max_prefill_tokens=40)
    (base,) = random_prompts((40,))
    assert spent(engine, [base, [*base, 7, 8]]) == (40 + 2 + 2 * 7, 40)


def test_samples_of_a_group_fork_and_later_groups_hit(path: Path) -> None:
    engine = make(path, max_running=4)
    (prompt,) = random_prompts((42,))
    params = SamplingParams(max_tokens=8, temperature=1.0, n=9, seed=3)
    computed, hit = spent(engine, [prompt], params)  # groups of 4, 4 and 1
    assert (computed, hit) == (42 + 2 + 2 + 9 * 7, 80)
    plain = make(path, max_running=4, prefix_cache=False)
    both = [e.generate([prompt], params)[0] for e in (engine, plain)]
    assert_same(*both)


def test_older_weights_are_never_hit(path: Path) -> None:
    engine, prompts = make(path), conversations()
    run(engine, prompts)
    for version in (1, 1, 2):  # the same version may be given anew
        update(engine, version, seed=version)
        assert spent(engine, prompts[:4])[1] < sum(len(prompt) - 4 for prompt in prompts[:4])
        model = build_tiny("qwen3", seed=version, **TINY)
        for _ in range(2):
            assert [each.token_ids for each in run(engine, prompts)] == [greedy(model, each, 8) for each in prompts]
    alone = random_prompts((50,), seed=9)
    run(engine, alone)
    engine.load(path)
    assert spent(engine, alone) == (50 + 7, 0)
    assert_same(run(engine, alone), run(make(path), alone))


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_weights_that_change_under_requests_leave_nothing_behind(path: Path, at: int) -> None:
    """What runs across the change, be it found, in prefill or decoding, keeps its pages and offers none of them."""
    engine, prompts = make(path, max_prefill_tokens=16), random_prompts((30, 50))
    run(engine, [prompt[:16] for prompt in prompts])
    steps = iter(range(1, 100))

    def change(*_: int) -> None:
        if next(steps) == at:
            engine.load(path)
        engine.check_integrity()

    engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0, n=2), on_progress=change)
    engine.check_integrity()
    assert spent(engine, prompts) == (80 + 2 * 7, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_forgets_what_the_pool_held(path: Path, level: int) -> None:
    engine, prompts = make(path), conversations()
    before = run(engine, prompts)
    engine.sleep(level=level)
    assert engine.blocks.available_pages == engine.blocks.total_pages
    engine.wake_up()
    if level == 2:
        engine.load(path)
    for layer in range(engine.model.num_layers):
        for part in engine.kv_pool.get_kv_buffer(layer):
            part[PAGE:] = float("nan")
    assert_same(run(engine, prompts), before)


def test_sleep_of_the_weights_alone_keeps_it(path: Path) -> None:
    engine, prompts = make(path), random_prompts((50,))
    run(engine, prompts)
    engine.sleep(tags=["weights"])
    engine.wake_up()
    assert spent(engine, prompts) == (2 + 7, 48)


def test_preempted_by_sleep_and_aborted_by_poison(path: Path) -> None:
    engine, prompts = make(path), random_prompts((30, 50))
    before = run(engine, prompts)

    def nap(done: int, total: int, generated: int) -> None:
        if generated in (4, 10):
            engine.sleep(unfinished="preempt")
            engine.check_integrity()
            assert engine.blocks.available_pages == engine.blocks.total_pages
            engine.wake_up()

    out = engine.generate(prompts, GREEDY, on_progress=nap)
    assert_same([samples[0] for samples in out], before)
    engine.abort_update("trainer died")
    assert engine.blocks.available_pages == engine.blocks.total_pages
    with pytest.raises(WeightUpdateError):
        engine.verify_update(write(engine.begin_update(1), seed=1, digest=1))
    engine.check_integrity()
    engine.load(path)
    assert_same(run(engine, prompts), before)


def test_small_pools_evict_before_they_preempt(path: Path) -> None:
    engine, plain = make(path, kv_tokens=128), make(path, prefix_cache=False)
    prompts = random_prompts((60, 50, 70, 40, 60, 50))
    for prompt in prompts * 2:  # one at a time: room for one of them, and for parts of the one before
        assert_same(run(engine, [prompt]), run(plain, [prompt]))
    assert engine.scheduler.preemptions == 0
    assert spent(engine, prompts[-1:])[1] == 48


def test_small_pools_preempt_and_find_what_they_had(path: Path) -> None:
    engine, plain = make(path, kv_tokens=96), make(path, prefix_cache=False, kv_tokens=96)
    prompts = random_prompts((20, 24, 28, 16))
    params = SamplingParams(max_tokens=40, temperature=0)
    assert_same(run(engine, prompts, params), run(plain, prompts, params))
    assert engine.scheduler.preemptions > 0
    assert engine.stats.prefix_hit_tokens > 0 and engine.stats.computed_tokens < plain.stats.computed_tokens


def test_nothing_but_kept_and_computed_tokens_is_read(path: Path, device: str) -> None:
    """NaN in every slot that neither the cache nor a running sample knows the content of, after every step."""
    engine = make(path, device=device, kv_tokens=192, max_prefill_tokens=24)
    table, cache = engine.cache.table.req_to_token, engine.prefixes.cache
    assert cache is not None

    def poison(*_: int) -> None:
        kept = torch.from_numpy(cache.pages())
        known = [(kept[:, None] * PAGE + torch.arange(PAGE)).flatten()]
        for sample in engine.scheduler.running:
            assert sample.handle is not None
            known.append(table[sample.handle.row, : len(sample.computed_tokens())].long().cpu())
        for layer in range(engine.model.num_layers):
            for part in engine.kv_pool.get_kv_buffer(layer):
                free = torch.ones(len(part), dtype=torch.bool)
                free[torch.cat(known)] = False
                part[free.to(part.device)] = float("nan")

    params = SamplingParams(max_tokens=20, temperature=0, n=2)
    expected = run(make(path, device=device, prefix_cache=False), conversations(), params)
    for _ in range(2):
        poison()
        out = engine.generate(conversations(), params, on_progress=poison)
        assert_same([samples[0] for samples in out], expected)
    assert engine.stats.prefix_hit_tokens > 0


def test_fp8_rows_of_other_scales_are_not_hit(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", head_dim=16)
    engine, fresh = (make(tmp_path, kv_cache_dtype="fp8_e4m3") for _ in range(2))
    prompts = random_prompts((50,))
    run(engine, prompts)
    for each in (engine, fresh):
        each.kv_pool.set_scales(1, 0.25, 0.03)
    assert_same(run(engine, prompts), run(fresh, prompts))
    assert engine.stats.prefix_hit_tokens == 0
    assert spent(engine, prompts)[1] == 48


@contextmanager
def failing(engine: Engine, what: str, at: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The runner's method `what` raises in its call number `at`, which comes within."""
    steps, right = iter(range(at)), getattr(engine.runner, what)

    def fail(*args: Any) -> Any:
        if next(steps, None) is None:
            raise ZeroDivisionError
        return right(*args)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.runner, what, fail)
        yield


@pytest.mark.parametrize("what", ["forward", "sample"])
def test_a_failing_step_leaves_nothing_locked(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = make(path, max_prefill_tokens=16), conversations()
    expected = run(make(path, prefix_cache=False), prompts)
    for at in (1, 3, 6):
        with failing(engine, what, at, monkeypatch):
            engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0, n=2))
        engine.check_integrity()
        assert engine.prefixes.cache is not None and engine.prefixes.cache.protected_size == 0
        assert_same(run(engine, prompts), expected)


def test_random_work(path: Path) -> None:
    """Prompts over a few beginnings, groups, small pool, weights that change; all adds up after every step."""
    rng = random.Random(5)
    engine = make(path, kv_tokens=160, max_running=5, max_prefill_tokens=24)
    plain = make(path, kv_tokens=160, max_running=5, prefix_cache=False)
    roots = random_prompts((40, 60, 25))
    for round_ in range(12):
        if round_ in (4, 8):
            for each in (engine, plain):
                update(each, round_, seed=round_)
        if round_ == 6:
            engine.sleep()
            engine.wake_up()
        prompts = [
            rng.choice(roots)[: rng.randrange(1, 61)] + [rng.randrange(199) for _ in range(rng.randrange(1, 12))]
            for _ in range(rng.randrange(1, 7))
        ]
        params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0, n=rng.randrange(1, 4))
        assert_same(run(engine, prompts, params), run(plain, prompts, params))
    assert engine.scheduler.preemptions > 0 and engine.stats.computed_tokens < plain.stats.computed_tokens


@pytest.mark.parametrize(
    ("kind", "overrides", "fields"),
    [
        ("mistral", {"sliding_window": 8, "head_dim": 16}, {}),
        ("ministral", {"sliding_window": 8, "head_dim": 16}, {}),
        ("qwen3_next", {}, {}),
        ("llama", {"head_dim": 16}, {"double_sparsity": DoubleSparsity(heavy_channel_num=4, heavy_token_num=16)}),
    ],
)
def test_off_where_pages_do_not_tell_all(
    tmp_path: Path, kind: str, overrides: dict[str, Any], fields: dict[str, Any]
) -> None:
    save_tiny(tmp_path, kind, **overrides)
    engine, prompts = make(tmp_path, **fields), random_prompts((30,))
    assert spent(engine, prompts) == spent(engine, prompts) == (30 + 7, 0)


# ---------------------------------------------------------------- without a model


def blocks_of(pages: int, rows: int = 4) -> PrefixBlocks:
    size = pages * PAGE
    config = KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=2, size=size, page_size=PAGE, dtype=torch.float32, device="cpu"
    )
    allocator = PagedTokenToKVPoolAllocator(size, PAGE, "cpu")
    blocks = BlockManager(ReqToTokenPool(rows, size, "cpu"), allocator, MHATokenToKVPool(config))
    return PrefixBlocks(blocks, RadixCache(allocator))


def test_equal_prompts_computed_side_by_side_keep_pages_of_their_own() -> None:
    """Only one of them is kept; the other must not lock it, or one alone could lack the pages to go on."""
    prefixes, tokens = blocks_of(pages=8), list(range(12))
    handles = []
    for _ in range(2):
        admitted = prefixes.admit(tokens)
        assert admitted is not None and admitted[1] == 0
        handles.append(admitted[0])
    assert prefixes.extend(handles, [12, 12]) is not None
    for handle in handles:
        prefixes.keep(handle, tokens)
        prefixes.check_integrity()
    (ledger,) = prefixes.ledgers
    assert ledger.available == 2
    prefixes.release(handles[0], tokens)
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 5  # the kept ones are nobody's now
    assert prefixes.extend(handles[1:], [32]) is not None  # the whole pool: the kept ones are evicted
    prefixes.release(handles[1], list(range(31)))
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 8


def test_pages_that_a_fork_goes_on_with_are_not_kept_without_its_lock() -> None:
    prefixes, tokens = blocks_of(pages=8), list(range(12))
    first, second = prefixes.admit(tokens), prefixes.admit(tokens)
    assert first is not None and second is not None
    assert prefixes.extend([first[0], second[0]], [12, 12]) is not None
    prefixes.keep(first[0], tokens)
    prefixes.keep(second[0], tokens)  # too late: its pages are its own
    fork = prefixes.fork(second[0])
    assert fork is not None
    prefixes.release(first[0], tokens)
    assert prefixes.extend([fork], [32]) is not None  # evicts what the first had kept
    prefixes.release(second[0], tokens)
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 0  # all are the fork's, none can be evicted
    prefixes.release(fork, list(range(32)))
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 8


def test_admit_with_pages_shares_them_or_changes_nothing() -> None:
    prefixes = blocks_of(pages=4)
    blocks = prefixes.blocks
    first = blocks.admit()
    assert first is not None and blocks.extend([first], [8]) is not None
    second = blocks.admit(blocks.pages(first))
    assert second is not None and blocks.seq_len(second) == 8
    blocks.check_integrity()
    assert blocks.available_pages == 2
    with pytest.raises(ValueError, match="is free and can't be shared"):
        blocks.admit(blocks.allocator.next_pages(1))  # type: ignore[arg-type]
    blocks.release(first)
    blocks.release(second)
    blocks.check_integrity()
    assert blocks.available_pages == 4
