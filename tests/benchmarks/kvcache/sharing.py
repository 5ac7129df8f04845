"""How full pages in use are over a long mixed workload, and what sharing saves on workloads like PagedAttention's.

Saved is counted as there: pages that sharing saves, of those that the same sequences would take without it, averaged
over all steps. The paper's traces are not here; lengths are log-normal with their means (Alpaca: prompts of 19 tokens,
answers of 58; ShareGPT: 161 and 338).
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollout import Engine, SamplingParams
from tests.benchmarks.common import Case, Figure, Figures, Scale, figures
from tests.benchmarks.kvcache import serving
from tests.benchmarks.kvcache.serving import PAGE_SIZE, Request, Usage, lengths

TRACES = {"Alpaca": (19, 58), "ShareGPT": (161, 338)}  # mean tokens of prompts and answers
WIDTHS = (2, 4, 6)
Seen = list[Usage]


def fill(scale: Scale) -> Figures:
    """2,000 requests, 250 prompts with 8 answers each, all lengths log-normal with median 300."""
    dice = np.random.default_rng(0)
    prompts = lengths(dice, 300, scale.choose(250, 3))
    requests = [Request(prompt=_words(dice, n), answers=lengths(dice, 300, 8)) for n in prompts]
    # no prefix cache: its pages are always full
    scheduler = serving.make_scheduler(scale.choose(131_072, 8192), scale.choose(256, 16), prefix_cache=False)
    seen = _watch(scheduler, requests)
    filled = [100 * each.filled for each in seen]
    mean = Figure(
        what="slots in use that hold a token, mean of all steps",
        value=statistics.mean(filled),
        unit="%",
        target=">= 96",
    )
    more = {"the same, over all steps together": _together(seen), "the same, least of any step": min(filled)}
    counts = {"steps": len(seen), "samples preempted": scheduler.preemptions}
    return [mean, *figures(more, "%"), *figures(counts, "")]


def parallel(scale: Scale) -> Figures:
    """n answers of each prompt."""
    saved = {}
    for trace, (prompt, answer) in TRACES.items():
        for n in WIDTHS:
            dice = np.random.default_rng(n)
            prompts = lengths(dice, _median(prompt), scale.choose(200, 4))
            requests = [Request(prompt=_words(dice, k), answers=lengths(dice, _median(answer), n)) for k in prompts]
            scheduler = serving.make_scheduler(65_536, 96, prefix_cache=False)
            saved[f"{trace}, {n} answers a prompt"] = _saved(_watch(scheduler, requests))
    return figures(saved, "% saved")


def shared_prefix(scale: Scale) -> Figures:
    """All prompts begin alike, as few-shot prompts do; the prefix cache finds what an earlier request computed."""
    found = []
    for prefix in (80, 341):
        dice = np.random.default_rng(prefix)
        common, rest = _words(dice, prefix), lengths(dice, 30, scale.choose(300, 6))
        requests = [Request(prompt=common + _words(dice, k), answers=lengths(dice, 30, 1)) for k in rest]
        scheduler = serving.make_scheduler(65_536, 64, prefix_cache=True)
        saved = _saved(_watch(scheduler, requests))
        computed = 100 * scheduler.stats.prefix_hit_tokens / sum(len(each.prompt) for each in requests)
        found += figures({"saved": saved, "prompt tokens found": computed}, "%", f"prefix of {prefix} tokens, ")
    return found


def beam(scale: Scale) -> Figures:
    """Beam search in the engine, a random model of two layers: which branches live is its own choice."""
    from tests.helpers.models import save_tiny

    saved = {}
    with tempfile.TemporaryDirectory() as directory:
        save_tiny(Path(directory), "qwen3", head_dim=16)
        for trace, means in TRACES.items():
            for width in WIDTHS:
                saved[f"{trace}, beam width {width}"] = _saved(_search(Path(directory), scale, means, width))
    return figures(saved, "% saved")


def _search(directory: Path, scale: Scale, means: tuple[int, int], width: int) -> Seen:
    count = scale.choose(24, 2)
    dice = np.random.default_rng(width)
    drawn = [[min(n, 500) for n in lengths(dice, _median(mean), count)] for mean in means]
    prompts = [_words(dice, n, 199) for n in drawn[0]]
    answers = [min(n, 8) for n in drawn[1]] if scale.tiny else drawn[1]
    engine = Engine.from_pretrained(
        directory, kv_tokens=32_768, page_size=PAGE_SIZE, max_running=48, max_context_len=1024, prefix_cache=False
    )
    params = [SamplingParams(max_tokens=n, beam_width=width, ignore_eos=True) for n in answers]
    seen: Seen = []
    engine.generate(prompts, params, on_progress=lambda *_: _note(seen, engine.prefixes, engine.scheduler))
    return seen


def _watch(scheduler: serving.Scheduler, requests: Sequence[Request]) -> Seen:
    assert isinstance(scheduler.blocks, serving.PrefixBlocks)
    blocks, seen = scheduler.blocks, Seen()
    serving.serve(scheduler, requests, lambda: _note(seen, blocks, scheduler))
    return seen


def _note(seen: Seen, prefixes: serving.PrefixBlocks, scheduler: serving.Scheduler) -> None:
    now = serving.usage(prefixes, scheduler.running)
    if now is not None:
        seen.append(now)


def _saved(seen: Seen) -> float:
    return 100 * statistics.mean(each.saved for each in seen)


def _together(seen: Seen) -> float:
    return 100 * sum(each.tokens for each in seen) / (PAGE_SIZE * sum(each.pages for each in seen))


def _median(mean: float) -> float:
    """Of a log-normal with that mean."""
    return mean / math.exp(serving.SIGMA**2 / 2)


def _words(dice: np.random.Generator, count: int, vocabulary: int = 150_000) -> list[int]:
    return dice.integers(2, vocabulary, count).tolist()


CASES: dict[str, Case] = {
    "filled slots": fill,
    "saved, parallel sampling": parallel,
    "saved, beam search": beam,
    "saved, shared prefix": shared_prefix,
}
