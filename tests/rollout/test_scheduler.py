"""The scheduling policy and shared pages of a prefix cache, over real blocks without a model."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import BlockManager, RadixCache, ReqHandle, ReqToTokenPool
from kvcache.allocators import PagedTokenToKVPoolAllocator
from rollout.config import EngineConfig
from rollout.requests import SamplingParams
from rollout.scheduling.prefix import PrefixBlocks
from rollout.scheduling.samples import Sample, Step
from rollout.scheduling.scheduler import Scheduler
from tests.helpers.kvcache.blocks import make_pool, make_windowed
from tests.helpers.rollout.tiered_world import queued

PAGE = 4
STOP = 0


def make(pages: int, max_running: int = 8, chunk: int = 8, mixed: int | None = None) -> Scheduler:
    size = pages * PAGE
    pool = make_pool(size, PAGE, num_layers=1, device="cpu")
    table = ReqToTokenPool(max_running, size, "cpu")
    allocator = PagedTokenToKVPoolAllocator(size, PAGE, "cpu")
    return schedule(BlockManager(table, allocator, pool), chunk, mixed)


def schedule(blocks: BlockManager, chunk: int, mixed: int | None = None) -> Scheduler:
    config = EngineConfig(
        page_size=PAGE,
        max_running=blocks.req_to_token.size,
        max_prefill_tokens=chunk,
        mixed_prefill_tokens=mixed,
    )
    return Scheduler(PrefixBlocks(blocks, None), config)


def used(scheduler: Scheduler) -> int:
    """Return the used pages of the pool of full layers."""
    return scheduler.blocks.ledgers[0].total - scheduler.blocks.ledgers[0].available


def idle(scheduler: Scheduler) -> bool:
    return all(ledger.available == ledger.total for ledger in scheduler.blocks.ledgers)


def request(number: int, prompt_len: int, max_tokens: int, n: int = 1) -> list[Sample]:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return queued(number, list(range(1, prompt_len + 1)), params, STOP)


def run_step(scheduler: Scheduler, token_of: dict[str, list[int]] | None = None) -> Step:
    """Run a step as the engine does, without a model."""
    step = scheduler.schedule()
    assert step.decode or step.chunks, "a step without work would repeat forever"
    slots = [] if not step.decode else [step.decode_slots]
    assert sum(len(part) for part in slots) == len(step.decode)
    for chunk in step.chunks:
        assert len(chunk.slots) == chunk.length > 0
    scheduler.computed(step)
    due = list(step.decode)
    for chunk in step.chunks:
        if chunk.last:
            due += [chunk.sample, *scheduler.fork_siblings(chunk.sample)]
    for sample in due:
        stream = (token_of or {}).get(sample.name, [])
        at = len(sample.output)
        scheduler.append(sample, stream[at] if at < len(stream) else 1, -1.0, 0)
    return step


def drain(scheduler: Scheduler) -> list[Step]:
    steps = []
    while scheduler.unfinished:
        steps.append(run_step(scheduler))
        assert len(steps) < 10_000
    return steps


def test_long_prompts_are_computed_in_chunks_while_others_decode() -> None:
    scheduler = make(pages=40)
    short, long = request(0, 3, 20), request(1, 30, 2)
    scheduler.add(short)
    scheduler.add(long)
    steps = drain(scheduler)
    chunks = [(c.start, c.length) for s in steps for c in s.chunks if c.sample is long[0]]
    # The short prompt used 3 of the first 8 tokens.
    assert chunks == [(0, 5), (5, 8), (13, 8), (21, 8), (29, 1)]
    assert all(s.decode == short for s in steps[1:5])
    assert all(sum(c.length for c in s.chunks) <= 8 for s in steps)


def test_prompt_tokens_beside_decoding_samples_are_bounded() -> None:
    scheduler = make(pages=60, mixed=3)
    first, second, third = request(0, 20, 9), request(1, 30, 2), request(2, 7, 2)
    for samples in (first, second, third):
        scheduler.add(samples)
    counts: dict[bool, list[int]] = {True: [], False: []}
    for step in drain(scheduler):
        counts[bool(step.decode)].append(sum(chunk.length for chunk in step.chunks))
    assert max(counts[True]) == 3 and max(counts[False]) == 8


def test_burst_of_requests_is_queued_and_served_in_order() -> None:
    scheduler = make(pages=8, chunk=64)
    requests = [request(i, 8, 4)[0] for i in range(12)]
    for sample in requests:
        scheduler.add([sample])
    first = [c.sample for s in drain(scheduler) for c in s.chunks if c.start == 0]
    assert list(dict.fromkeys(first)) == requests
    assert all(sample.finish_reason == "length" for sample in requests)
    assert scheduler.preemptions == 0  # admission left room for the answers


def test_preemption_requeues_the_youngest_sample_and_recomputes_it() -> None:
    scheduler = make(pages=8, chunk=64)
    old, young = request(0, 4, 20)[0], request(1, 4, 20)[0]
    late = request(2, 12, 2)[0]
    scheduler.add([old])
    scheduler.add([young])
    steps = [run_step(scheduler) for _ in range(10)]
    scheduler.add([late])
    chunks = [c for s in steps + drain(scheduler) for c in s.chunks]
    assert scheduler.preemptions == 1
    assert [c.sample for c in chunks] == [old, young, young, late]  # ahead of `late` in the queue
    assert chunks[2].start == 0 and chunks[2].length > 4  # the prompt and the present answer
    assert len(old.output) == len(young.output) == 20


def test_samples_of_a_prompt_share_its_pages() -> None:
    scheduler = make(pages=40, chunk=64)
    scheduler.add(request(0, 17, 4, n=6))
    run_step(scheduler)
    assert len(scheduler.running) == 6
    assert used(scheduler) == 5  # ceil(17 / 4), once
    run_step(scheduler)
    assert used(scheduler) == 4 + 6  # every sample has its own last page
    drain(scheduler)
    assert idle(scheduler)


def blocks_of(pages: int) -> PrefixBlocks:
    """Build blocks with a prefix cache."""
    empty = make(pages).blocks
    assert isinstance(empty, PrefixBlocks)
    return PrefixBlocks(empty.blocks, RadixCache(empty.blocks.allocator))


def grow(blocks: PrefixBlocks, handles: list[ReqHandle], length: int) -> Any:
    rows = blocks.blocks.req_to_token.rows(handles)
    return blocks.grow(rows, np.full(len(rows), length))


def cached(pages: int, computed: int) -> Scheduler:
    """Build a scheduler whose prefix cache has the first tokens of every request, unlocked."""
    scheduler = make(pages, chunk=64)
    scheduler.blocks = blocks_of(pages)
    scheduler.add(request(99, computed, 1))
    drain(scheduler)
    return scheduler


def test_pages_shared_with_running_samples_are_counted_once() -> None:
    """Run samples that share 20 pages; each needs 2 more pages and a third one kept free."""
    scheduler = cached(pages=32, computed=80)
    scheduler.add(request(0, 81, 4))
    run_step(scheduler)
    for number in (1, 2, 3, 4):
        scheduler.add(request(number, 82, 4))
    run_step(scheduler)
    assert [sample.request for sample in scheduler.running] == [0, 1, 2, 3, 4]
    scheduler.blocks.check_integrity()  # type: ignore[attr-defined]
    drain(scheduler)
    assert scheduler.preemptions == 0 and idle(scheduler)


def test_unlocked_cached_pages_count_as_taken_at_admission() -> None:
    """Check admission with cached pages, which stay available until they are locked.

    Without the count, the second request would be admitted and its pages would be missing.
    """
    scheduler = cached(pages=32, computed=80)
    scheduler.add(request(0, 81, 4))
    scheduler.add(queued(1, [9] * 44, SamplingParams(max_tokens=4)))
    run_step(scheduler)
    assert [sample.request for sample in scheduler.running] == [0]
    drain(scheduler)
    assert scheduler.preemptions == 0 and idle(scheduler)


@settings(max_examples=40)
@given(
    pages=st.integers(6, 20),
    max_running=st.integers(1, 6),
    chunk=st.integers(1, 20),
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(0, 6)),
        min_size=1,
        max_size=8,
    ),
    interrupt=st.integers(0, 40),
    window=st.none() | st.tuples(st.integers(1, 9), st.none() | st.just(6)),
)
def test_random_requests_all_finish_and_no_page_is_lost(
    pages: int,
    max_running: int,
    chunk: int,
    arrivals: list[tuple[int, int, int, int]],
    interrupt: int,
    window: tuple[int, int | None] | None,
) -> None:
    """Run requests that arrive and stop at random; preempt all samples once, as `sleep` does."""
    scheduler = make(pages, max_running, chunk)
    if window is not None:
        scheduler = schedule(
            make_windowed(PAGE, window[0], pages, window[1], max_running, 24), chunk
        )
    pending = [(request(i, p, m, n), stop) for i, (p, m, n, stop) in enumerate(arrivals)]
    all_samples = [sample for samples, _ in pending for sample in samples]
    stops = {s.name: [1] * (stop + s.index) + [STOP] for samples, stop in pending for s in samples}
    steps = 0
    while pending or scheduler.unfinished:
        if pending:
            scheduler.add(pending.pop(0)[0])
        step = run_step(scheduler, stops)
        assert len(step.decode) <= max_running and sum(c.length for c in step.chunks) <= chunk
        scheduler.blocks.check_integrity()  # type: ignore[attr-defined]
        steps += 1
        if steps == interrupt:
            scheduler.preempt_all()
            assert idle(scheduler)
        assert steps < 5000
    for sample in all_samples:
        expected = stops[sample.name][: sample.params.max_tokens]
        assert sample.output[:-1] == expected[:-1] and len(sample.output) == len(sample.versions)
        assert sample.finish_reason == ("stop" if sample.output[-1] == STOP else "length")
    assert idle(scheduler)


# ---------------------------------------------------------------- blocks with a prefix cache


def test_equal_prompts_in_one_step_keep_their_own_pages() -> None:
    """Check that only one prompt's pages are cached, and that the other sequence locks none.

    If it did, a single sequence could lack pages to continue.
    """
    prefixes, tokens = blocks_of(pages=8), list(range(12))
    handles = []
    for _ in range(2):
        admitted = prefixes.admit(tokens)
        assert admitted is not None and admitted[1] == 0
        handles.append(admitted[0])
    assert grow(prefixes, handles, 12) is not None
    for handle in handles:
        prefixes.keep(handle, tokens)
        prefixes.check_integrity()
    (ledger,) = prefixes.ledgers
    assert ledger.available == 2
    prefixes.release(handles[0], tokens)
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 5  # the cached pages are unlocked now
    # The sequence needs the whole pool, so the cached pages are evicted.
    assert grow(prefixes, handles[1:], 32) is not None
    prefixes.release(handles[1], list(range(31)))
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 8


def test_pages_used_by_an_unlocked_fork_are_not_cached() -> None:
    prefixes, tokens = blocks_of(pages=8), list(range(12))
    first, second = prefixes.admit(tokens), prefixes.admit(tokens)
    assert first is not None and second is not None
    assert grow(prefixes, [first[0], second[0]], 12) is not None
    prefixes.keep(first[0], tokens)
    prefixes.keep(second[0], tokens)  # without effect, because the first one was faster
    fork = prefixes.fork(second[0])
    assert fork is not None
    prefixes.release(first[0], tokens)
    assert grow(prefixes, [fork], 32) is not None  # evicts the first sequence's pages
    prefixes.release(second[0], tokens)
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 0  # the fork uses all pages, none can be evicted
    prefixes.release(fork, list(range(32)))
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 8
