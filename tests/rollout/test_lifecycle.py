"""Sleep, wake-up, the two-phase weight update, and elastic KV pools."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memsaver import LeaseError, OutOfMemory, StateError
from rollout import Engine, KVTiers
from tests.helpers.rollout.answers import GREEDY, check, ids, random_prompts
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.updates import PROMPTS, addresses, answers, tiny, update


@pytest.fixture
def engine(path: Path, device: str) -> Engine:
    return Engine.from_pretrained(path, device=device, kv_tokens=512)


def test_sleep_level_1_releases_all_memory_and_keeps_the_answers(engine: Engine) -> None:
    before = answers(engine)
    pointers = addresses(engine)
    for _ in range(2):
        engine.sleep()
        report = engine.report()
        assert report.committed_bytes == 0
        assert report.tags["weights"].backup_bytes == report.tags["weights"].live_bytes > 0
        assert report.tags["kv_cache"].backup_bytes == 0
        engine.sleep()  # without effect, because all tags sleep already
        engine.wake_up(["weights"])
        engine.wake_up(["kv_cache", "cuda_graph"])
        assert answers(engine) == before
    assert addresses(engine) == pointers
    moves = [
        (event.op, event.tag) for event in engine.drain_events() if event.op in ("pause", "resume")
    ]
    assert moves == [(op, tag) for op in ("pause", "resume") for tag in engine.tags] * 2


def test_generate_names_why_the_engine_is_unavailable(engine: Engine) -> None:
    engine.sleep()
    for asleep in (engine.tags, engine.tags[1:]):
        with pytest.raises(StateError, match=rf"paused: {', '.join(asleep)} \(call wake_up\)"):
            answers(engine)
        engine.wake_up(["weights"])
    engine.wake_up()
    assert engine.unavailable_reason() is None
    engine.sleep(level=2)
    engine.wake_up()
    assert engine.report().backup_bytes == 0
    with pytest.raises(StateError, match=r"weights undefined: .*discarded by sleep\(level=2\)"):
        answers(engine)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda e: e.sleep(level=3), "sleep level=3"),
        (lambda e: e.sleep(unfinished="wait"), "unfinished='wait'"),
        (lambda e: e.wake_up(["weights", "params"]), r"unknown tags \['params'\]"),
    ],
)
def test_sleep_and_wake_up_refuse_unknown_arguments(engine: Engine, call, match: str) -> None:  # type: ignore[no-untyped-def]
    engine.sleep()
    with pytest.raises(ValueError, match=match):
        call(engine)
    assert engine.saver.is_paused("weights") and engine.saver.is_paused("kv_cache")


def test_preempted_requests_continue_under_the_new_version(engine: Engine) -> None:
    def swap(done: int, total: int, generated: int) -> None:
        if generated == 6:
            engine.sleep(level=2, unfinished="recompute")
            engine.wake_up()
            update(engine, 4, seed=5)

    for samples in engine.generate(PROMPTS, GREEDY, on_progress=swap):
        old = 2 + engine.steps.depth
        assert samples[0].weight_versions == [0] * old + [4] * (8 - old)
    check(tiny(5), PROMPTS, engine.generate(PROMPTS, GREEDY))


def test_aborting_sleep_ends_unfinished_requests_with_their_present_answers(engine: Engine) -> None:
    before = answers(engine)

    def stop(done: int, total: int, generated: int) -> None:
        if generated == 6:
            engine.sleep(unfinished="abort")

    out = engine.generate(PROMPTS, GREEDY, on_progress=stop)
    assert ids(out) == [[answer[: 2 + engine.steps.depth]] for answer in before]
    assert {samples[0].finish_reason for samples in out} == {"abort"}
    engine.wake_up()
    engine.check_integrity()
    assert answers(engine) == before


def test_elastic_pool_grows_from_one_sample_and_answers_like_a_fixed_pool(
    path: Path, device: str
) -> None:
    """Check that the pool grows to the tokens that its samples can use once a limit is lifted.

    Lifting the limit during `generate` stands for memory that another tag frees. The 64 samples can
    use 80 tokens and one more page each. On a GPU a tag consists of pieces of 1 GiB, one of which
    is enough for all samples, so the test asks for more tokens there.
    """
    whole_size = 1 << 16 if device == "cpu" else 1 << 22
    sizes = {"kv_tokens": whole_size, "max_context_len": 96}
    engine = Engine.from_pretrained(path, device=device, elastic=True, **sizes)
    fixed = Engine.from_pretrained(path, device=device, **sizes)
    pool, saver = engine.kv_pool, engine.saver
    # 5,120 tokens, which do not fit into one extent of 2 MiB.
    prompts, params = random_prompts([68] * 64), replace(GREEDY, max_tokens=12)
    expected = ids(fixed.generate(prompts, params))
    pointers, whole = addresses(engine), saver.report().tags["kv_cache"].committed_bytes
    pool_sizes, running = list[int](), list[int]()

    def watch(done: int, total: int, tokens: int) -> None:
        pool_sizes.append(pool.size)
        if not done:
            running.append(len(engine.scheduler.running))
        else:
            saver.limit_bytes = None
            if device != "cpu" and (elastic := engine.cache.elastic) is not None:
                elastic.hurry()  # a GPU's steps end before the next query of free memory
                elastic.fit(lambda: whole_size, lambda pages: False)

    for _ in range(2):
        engine.sleep(level=1)
        engine.wake_up(partly=True)
        with pytest.raises(ValueError, match="prompt 0: no beam search in a pool that woke partly"):
            engine.generate(prompts, replace(params, beam_width=2))
        engine.check_integrity()
        assert 96 <= pool.size < whole_size
        saver.limit_bytes = saver.report().committed_bytes
        pool_sizes.clear()
        running.clear()
        assert ids(engine.generate(prompts, params, watch)) == expected
        if device == "cpu":
            assert max(running) < len(prompts)  # the pool was too small for all samples
        assert pool_sizes[0] < whole_size and pool_sizes == sorted(pool_sizes)
        wanted = 64 * 96 if device == "cpu" else whole_size  # rounded up to pages of 2 MiB below
        assert pool_sizes[0] < pool.size <= wanted + (4 << 20) // pool.bytes_per_token
        engine.check_integrity()
    engine.sleep(level=1)
    engine.wake_up()
    assert pool.size == whole_size and addresses(engine) == pointers
    assert saver.report().tags["kv_cache"].committed_bytes == whole


def test_elastic_pool_grows_into_memory_of_torchs_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a tag in place of torch's cache, whose memory counts as free."""
    engine = Engine.from_pretrained(path, elastic=True, kv_tokens=1 << 16)
    saver, elastic = engine.saver, engine.cache.elastic
    assert elastic is not None
    engine.sleep(level=1)
    engine.wake_up(partly=True)
    kept, before = saver.empty(8 << 20, torch.uint8, tag="cache"), engine.kv_pool.size
    saver.limit_bytes = saver.report().committed_bytes
    monkeypatch.setattr(saver.backend, "reclaim", lambda: saver.pause("cache"))
    monkeypatch.setattr(type(saver.backend), "free_bytes", kept.nbytes)
    elastic.hurry()
    elastic.fit(lambda: 1 << 16, lambda pages: False)
    assert (engine.kv_pool.size - before) * engine.kv_pool.bytes_per_token > 7 << 20
    assert saver.is_paused("cache")
    engine.check_integrity()


def test_elastic_pool_wakes_up_whole_or_not_at_all_and_other_pools_are_fixed(
    path: Path, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.from_pretrained(path, elastic=True, kv_tokens=1 << 16)
    before, saver = answers(engine), engine.saver
    engine.sleep()
    engine.wake_up(["weights"])
    saver.limit_bytes = saver.report().committed_bytes + (4 << 20)
    with pytest.raises(OutOfMemory):
        engine.wake_up()
    assert saver.is_paused("kv_cache")
    saver.limit_bytes = None
    engine.wake_up()
    assert engine.kv_pool.size == 1 << 16 and answers(engine) == before
    hybrid = Engine.from_pretrained(saved("qwen3_next")[0], elastic=True)
    tiered = Engine.from_pretrained(path, elastic=True, tiers=KVTiers(host_ratio=1.0))
    assert hybrid.cache.elastic is tiered.cache.elastic is None
    reasons = ["the model has sliding windows or linear layers", "cached pages go to host tiers"]
    fixed = "elastic=True: the KV pool has a fixed size and wakes up whole: "
    own = [record for record in caplog.records if not record.name.startswith("transformers")]
    assert [record.getMessage() for record in own] == [fixed + why for why in reasons]


def test_shrinking_pool_releases_memory_as_its_last_requests_end(path: Path, device: str) -> None:
    """Generate answers of many lengths, forked from prompts with common beginnings.

    On a GPU the pool shrinks by pieces of 1 GiB, down to one piece.
    """
    rng, whole_size = random.Random(1), 1 << 12 if device == "cpu" else 1 << 22
    sizes = {"kv_tokens": whole_size, "max_context_len": 256, "max_running": 64, "page_size": 4}
    engine = Engine.from_pretrained(path, device=device, elastic=True, **sizes)
    fixed = Engine.from_pretrained(path, device=device, **sizes)
    pool, saver = engine.kv_pool, engine.saver
    (common,) = random_prompts([40])
    prompts = [
        [*common[: rng.randint(0, 40)], *tail]
        for tail in random_prompts([rng.randint(1, 30) for _ in range(16)])
    ]
    params = [
        replace(GREEDY, max_tokens=length, n=rng.randint(1, 3), temperature=rng.choice([0, 0.8]))
        for length in [*(rng.randint(2, 30) for _ in range(15)), 90]
    ]
    params = [replace(param, seed=number) for number, param in enumerate(params)]
    expected = ids(fixed.generate(prompts, params))
    pool_sizes = list[int]()

    def watch(done: int, total: int, tokens: int) -> None:
        pool_sizes.append(pool.size)
        if pool_sizes[-1] != pool_sizes[-2:][0]:
            engine.check_integrity()
            assert saver.report().tags["kv_cache"].committed_bytes >= pool.nbytes

    for turn in range(2):
        engine.sleep(level=1)
        engine.wake_up(partly=bool(turn))
        if turn:
            saver.limit_bytes = saver.report().committed_bytes + (1 << 21)
        engine.shrink()
        pool_sizes.append(pool.size)  # on a GPU the pool is too large and shrinks immediately
        assert ids(engine.generate(prompts, params, watch)) == expected
        saver.limit_bytes = None
        if device == "cpu" or not turn:
            assert pool_sizes[-1] < max(pool_sizes) // 2
        pool_sizes.clear()
    assert ids(engine.generate(prompts, params)) == expected  # the pool has grown again
    engine.sleep(level=1)
    engine.wake_up()
    assert ids(engine.generate(prompts, params, watch)) == expected
    assert {*pool_sizes} == {whole_size}


@pytest.mark.parametrize("error", [OutOfMemory("no", 1, 1, {}), LeaseError("a peer maps it")])
def test_pool_stays_unchanged_when_shrinking_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = Engine.from_pretrained(path, elastic=True, kv_tokens=1 << 12)
    before, calls = answers(engine), list[int]()

    def fail(tag: str, nbytes: int) -> None:
        calls.append(nbytes)
        raise error

    monkeypatch.setattr(engine.saver, "resize", fail)
    engine.shrink()
    assert answers(engine) == before and len(calls) == 1
    engine.check_integrity()
    assert engine.kv_pool.size == 1 << 12 and not engine.cache.withheld_pages
