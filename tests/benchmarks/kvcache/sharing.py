"""How full pages in use are over a long mixed workload, and what sharing saves on workloads like
PagedAttention's.

Saved is counted as there: pages that sharing saves, of those that the same sequences would take
without it, averaged over all steps. The paper's traces are not here; lengths are log-normal with
their means (Alpaca: prompts of 19 tokens, answers of 58; ShareGPT: 161 and 338). But for beam
search there is no model, the real scheduler and block manager serve requests with made-up tokens.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvcache import BlockManager, RadixCache, ReqToTokenPool
from kvcache.allocators import PagedTokenToKVPoolAllocator
from rollout import Engine, SamplingParams
from rollout.serving.prefix import PrefixBlocks
from rollout.serving.samples import Sample
from rollout.serving.scheduler import Scheduler
from tests.benchmarks.common import Case, Figure, Figures, Scale, figures
from tests.benchmarks.kvcache.pools import PAGE_SIZE, make_pool

TRACES = {"Alpaca": (19, 58), "ShareGPT": (161, 338)}  # mean tokens of prompts and answers
WIDTHS = (2, 4, 6)
LONGEST = 2048  # tokens of a prompt, and of an answer
STOP, WORD = 0, 1
SIGMA = 0.8  # of the log-normal lengths


def fill(scale: Scale) -> Figures:
    """2,000 requests, 250 prompts with 8 answers each, all lengths log-normal with median 300."""
    dice = np.random.default_rng(0)
    prompts = lengths(dice, 300, scale.choose(250, 3))
    requests = [Request(prompt=_words(dice, n), answers=lengths(dice, 300, 8)) for n in prompts]
    # no prefix cache: its pages are always full
    scheduler = make_scheduler(
        scale.choose(131_072, 8192), scale.choose(256, 16), prefix_cache=False
    )
    seen = _watch(scheduler, requests)
    filled = [100 * each.filled for each in seen]
    mean = Figure(
        what="slots in use that hold a token, mean of all steps",
        value=statistics.mean(filled),
        unit="%",
        target=">= 96",
    )
    more = {
        "the same, over all steps together": _together(seen),
        "the same, least of any step": min(filled),
    }
    counts = {"steps": len(seen), "samples preempted": scheduler.preemptions}
    return [mean, *figures(more, "%"), *figures(counts, "")]


def parallel(scale: Scale) -> Figures:
    """n answers of each prompt."""
    saved = {}
    for trace, (prompt, answer) in TRACES.items():
        for n in WIDTHS:
            dice = np.random.default_rng(n)
            prompts = lengths(dice, _median(prompt), scale.choose(200, 4))
            requests = [
                Request(prompt=_words(dice, k), answers=lengths(dice, _median(answer), n))
                for k in prompts
            ]
            scheduler = make_scheduler(65_536, 96, prefix_cache=False)
            saved[f"{trace}, {n} answers a prompt"] = _saved(_watch(scheduler, requests))
    return figures(saved, "% saved")


def shared_prefix(scale: Scale) -> Figures:
    """All prompts begin alike, as few-shot prompts do; the prefix cache finds what an earlier
    request computed.
    """
    found = []
    for prefix in (80, 341):
        dice = np.random.default_rng(prefix)
        common, rest = _words(dice, prefix), lengths(dice, 30, scale.choose(300, 6))
        requests = [
            Request(prompt=common + _words(dice, k), answers=lengths(dice, 30, 1)) for k in rest
        ]
        scheduler = make_scheduler(65_536, 64, prefix_cache=True)
        saved = _saved(_watch(scheduler, requests))
        computed = (
            100 * scheduler.stats.prefix_hit_tokens / sum(len(each.prompt) for each in requests)
        )
        found += figures(
            {"saved": saved, "prompt tokens found": computed}, "%", f"prefix of {prefix} tokens, "
        )
    return found


def beam(scale: Scale) -> Figures:
    """Beam search in the engine, a random model of two layers: which branches live is its own
    choice.
    """
    from tests.helpers.models import save_tiny

    saved = {}
    with tempfile.TemporaryDirectory() as directory:
        save_tiny(Path(directory), "qwen3", head_dim=16)
        for trace, means in TRACES.items():
            for width in WIDTHS:
                saved[f"{trace}, beam width {width}"] = _saved(
                    _search(Path(directory), scale, means, width)
                )
    return figures(saved, "% saved")


def _search(directory: Path, scale: Scale, means: tuple[int, int], width: int) -> Seen:
    count = scale.choose(24, 2)
    dice = np.random.default_rng(width)
    drawn = [[min(n, 500) for n in lengths(dice, _median(mean), count)] for mean in means]
    prompts = [_words(dice, n, 199) for n in drawn[0]]
    answers = [min(n, 8) for n in drawn[1]] if scale.tiny else drawn[1]
    engine = Engine.from_pretrained(
        directory,
        kv_tokens=32_768,
        page_size=PAGE_SIZE,
        max_running=48,
        max_context_len=1024,
        prefix_cache=False,
    )
    params = [SamplingParams(max_tokens=n, beam_width=width, ignore_eos=True) for n in answers]
    seen: Seen = []
    engine.generate(
        prompts, params, on_progress=lambda *_: _note(seen, engine.prefixes, engine.scheduler)
    )
    return seen


def _watch(scheduler: Scheduler, requests: Sequence[Request]) -> Seen:
    assert isinstance(scheduler.blocks, PrefixBlocks)
    blocks, seen = scheduler.blocks, Seen()
    serve(scheduler, requests, lambda: _note(seen, blocks, scheduler))
    return seen


def _note(seen: Seen, prefixes: PrefixBlocks, scheduler: Scheduler) -> None:
    now = usage(prefixes, scheduler.running)
    if now is not None:
        seen.append(now)


def _saved(seen: Seen) -> float:
    return 100 * statistics.mean(each.saved for each in seen)


def _together(seen: Seen) -> float:
    return 100 * sum(each.tokens for each in seen) / (PAGE_SIZE * sum(each.pages for each in seen))


def _median(mean: float) -> float:
    """Of a log-normal with that mean."""
    return mean / math.exp(SIGMA**2 / 2)


def _words(dice: np.random.Generator, count: int, vocabulary: int = 150_000) -> list[int]:
    return dice.integers(2, vocabulary, count).tolist()


# ---------------------------------------------------------------- serving without a model


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: list[int]
    answers: list[int]  # lengths, one a sample


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of all running sequences after a step. pages: in use, each once; unshared: what they would
    take without sharing;
    tokens: slots of those pages that hold a token.
    """

    pages: int
    unshared: int
    tokens: int

    @property
    def filled(self) -> float:
        return self.tokens / (self.pages * PAGE_SIZE)

    @property
    def saved(self) -> float:
        return 1 - self.pages / self.unshared


def lengths(dice: np.random.Generator, median: float, count: int) -> list[int]:
    """Log-normal, in 1..LONGEST."""
    drawn = dice.lognormal(np.log(median), SIGMA, count)
    return np.clip(np.rint(drawn), 1, LONGEST).astype(int).tolist()


def usage(prefixes: PrefixBlocks, running: Sequence[Sample]) -> Usage | None:
    """None while nobody holds a page.

    What only the prefix cache holds does not count: it is free for the asking.
    """
    blocks = prefixes.blocks
    filled = np.zeros(blocks.total_pages + 1, dtype=np.int64)
    unshared = 0
    for handle in (sample.handle for sample in running if sample.handle is not None):
        pages, length = blocks.pages(handle), blocks.seq_len(handle)
        unshared += len(pages)
        held = np.minimum(length - PAGE_SIZE * np.arange(len(pages)), PAGE_SIZE)
        filled[pages] = np.maximum(filled[pages], held)
    (ledger,) = prefixes.ledgers
    pages = ledger.total - ledger.available
    assert pages == np.count_nonzero(filled), "pages are in use that no sequence names"
    return Usage(pages=pages, unshared=unshared, tokens=int(filled.sum())) if pages else None


def make_scheduler(kv_tokens: int, max_running: int, prefix_cache: bool) -> Scheduler:
    pool = make_pool(torch.device("cpu"), kv_tokens, num_layers=1, num_kv_heads=1, head_dim=1)
    allocator = PagedTokenToKVPoolAllocator(kv_tokens, PAGE_SIZE, "cpu")
    blocks = BlockManager(ReqToTokenPool(max_running, 2 * LONGEST, "cpu"), allocator, pool)
    prefixes = PrefixBlocks(blocks, RadixCache(allocator) if prefix_cache else None)
    return Scheduler(
        prefixes, page_size=PAGE_SIZE, max_running=max_running, max_prefill_tokens=2048
    )


def serve(
    scheduler: Scheduler, requests: Sequence[Request], after_step: Callable[[], None]
) -> None:
    """All requests to their ends, in order of arrival, all waiting at the start."""
    ends: dict[Sample, int] = {}
    for number, request in enumerate(requests):
        params = SamplingParams(max_tokens=LONGEST, n=len(request.answers))
        samples = [
            Sample(
                request=number,
                index=i,
                prompt=request.prompt,
                params=params,
                seed=0,
                stop_ids=frozenset([STOP]),
            )
            for i in range(len(request.answers))
        ]
        ends |= zip(samples, request.answers, strict=True)
        scheduler.check_fits(f"request {number}", len(request.prompt), params)
        scheduler.add(samples)
    while scheduler.unfinished:
        step = scheduler.schedule()
        scheduler.computed(step)
        due = list(step.decode)
        for chunk in step.chunks:
            if chunk.last:
                due += [chunk.sample, *scheduler.fork_siblings(chunk.sample)]
        after_step()
        for sample in due:
            scheduler.append(
                sample, STOP if len(sample.output) + 1 == ends[sample] else WORD, 0.0, 0
            )
    assert all(len(sample.output) == end for sample, end in ends.items())


Seen = list[Usage]
CASES: dict[str, Case] = {
    "filled slots": fill,
    "saved, parallel sampling": parallel,
    "saved, beam search": beam,
    "saved, shared prefix": shared_prefix,
}
