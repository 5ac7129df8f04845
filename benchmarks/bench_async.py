"""An `AsyncEngine` against blocking calls of the same engine: throughput, gaps, interrupts.

`make bench-rollout`, at the Qwen2.5-0.5B shape. 256 requests at once, blocking and as streams that
coroutines of the same process read: tokens a second, and the times between two pieces of a stream
once all have begun. The first token of an arrival beside 255 streams. Then 64 samples are
interrupted by a sleep, by an engine that keeps their keys and values on the host, and by one that
computes them again: from the sleep to the next token of all, and whether the answers are those
without an interrupt.

    python -m benchmarks.bench_async --shape qwen2.5-7b
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch

from benchmarks.bench_steps import build
from benchmarks.common import Scale, make_scale, parser, report
from rollout import AsyncEngine, Engine, KVTiers, SamplingParams, TokenStream

PASSES = 5


def prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    torch.manual_seed(0)
    return torch.randint(engine.model.vocab_size, (count, length)).tolist()


async def read(stream: TokenStream) -> list[float]:
    """Return the times of the stream's pieces."""
    times = [time.perf_counter()]
    async for _ in stream:
        times.append(time.perf_counter())
    return times


async def as_streams(engine: Engine, given: list[list[int]], params: SamplingParams) -> Any:
    """Return the seconds of all requests together, and the times of each stream's pieces."""
    async with AsyncEngine(engine) as shared:
        began = time.perf_counter()
        times = await asyncio.gather(*(read(shared.submit(prompt, params)) for prompt in given))
        return time.perf_counter() - began, times


async def as_answers(engine: Engine, given: list[list[int]], params: SamplingParams) -> float:
    """Return the seconds of all requests together, whose answers are awaited as a whole."""
    async with AsyncEngine(engine) as shared:
        began = time.perf_counter()
        await asyncio.gather(*(shared.generate(prompt, params) for prompt in given))
        return time.perf_counter() - began


async def late_arrival(engine: Engine, given: list[list[int]], params: SamplingParams) -> float:
    """Return the seconds to the first token of a request that arrives beside the others."""
    async with AsyncEngine(engine) as shared:
        others = [shared.submit(prompt, params) for prompt in given[1:]]
        await asyncio.gather(*(anext(stream) for stream in others))
        readers = [asyncio.create_task(read(stream)) for stream in others]
        began = time.perf_counter()
        await anext(shared.submit(given[0], params))
        seconds = time.perf_counter() - began
        await asyncio.gather(*readers)
        return seconds


def gaps_after_begin(times: list[list[float]]) -> list[float]:
    """Return the seconds between two pieces of a stream, once every stream has had its first."""
    begun = max(pieces[1] for pieces in times)
    gaps = list[float]()
    for pieces in times:
        gaps += [then - first for first, then in pairwise(pieces) if first >= begun]
    return gaps


def throughput(engine: Engine, given: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Compare blocking calls and streams, in turn; the first of each compiles."""
    blocking, answered, streamed, gaps, firsts = [], [], [], list[float](), []
    for number in range(PASSES + 1):
        began = time.perf_counter()
        engine.generate(given, params)
        blocked = time.perf_counter() - began
        whole = asyncio.run(as_answers(engine, given, params))
        seconds, times = asyncio.run(as_streams(engine, given, params))
        if number:
            blocking.append(blocked)
            answered.append(whole)
            streamed.append(seconds)
            gaps += gaps_after_begin(times)
            firsts.append(asyncio.run(late_arrival(engine, given, params)))
    tokens = len(given) * params.max_tokens
    steps = statistics.median(blocking) / params.max_tokens
    return {
        "blocking, tokens a second": tokens / statistics.median(blocking),
        "streams, tokens a second": tokens / statistics.median(streamed),
        "answers of blocking": statistics.median(blocking) / statistics.median(answered),
        "streams of blocking": statistics.median(blocking) / statistics.median(streamed),
        "ms a step, of blocking": 1e3 * steps,
        "ms between pieces, median": 1e3 * statistics.median(gaps),
        "ms between pieces, p99": 1e3 * statistics.quantiles(gaps, n=100)[-1],
        "ms to the first token beside 255": 1e3 * statistics.median(firsts),
    }


async def interrupted(
    engine: Engine, given: list[list[int]], params: SamplingParams, how: str
) -> Any:
    """Return the seconds of a sleep, from its end to the next token of all, and the answers."""
    async with AsyncEngine(engine) as shared:
        streams = [shared.submit(prompt, params) for prompt in given]
        for stream in streams:
            await anext(stream)
        began = time.perf_counter()
        await shared.call("sleep", 1, unfinished=how)
        asleep = time.perf_counter()
        await shared.call("wake_up")
        awake = time.perf_counter()
        for stream in streams:
            while stream.arrived:  # told before the sleep
                await anext(stream)
            await anext(stream)
        back = time.perf_counter()
        answers = await asyncio.gather(*(stream.result() for stream in streams))
        tokens = [answer.token_ids for (answer,) in answers]
        return {
            "sleep": asleep - began,
            "wake-up": awake - asleep,
            "next token": back - awake,
        }, tokens


def interrupts(
    engine: Engine, given: list[list[int]], params: SamplingParams, how: str
) -> dict[str, float]:
    wanted = [answer.token_ids for (answer,) in engine.generate(given, params)]
    figures: dict[str, float] = {}
    for _ in range(2):  # the first compiles
        seconds, tokens = asyncio.run(interrupted(engine, given, params, how))
        figures = {f"{how}: {stage}, ms": 1e3 * value for stage, value in seconds.items()}
        figures[f"{how}: same answers of {len(given)}"] = sum(map(list.__eq__, tokens, wanted))
    return figures


def measure(scale: Scale, shape: str) -> dict[str, float]:
    batch, samples = scale.choose(256, 4), scale.choose(64, 3)
    prompt, answer, length = scale.choose(128, 8), scale.choose(128, 8), scale.choose(2000, 24)
    params = SamplingParams(max_tokens=answer, temperature=1.0, seed=1, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = {"max_running": batch, "kv_tokens": batch * (prompt + answer + 16)}
        engine = build(scale, folder, shape, **plain)
        figures = throughput(engine, prompts(engine, batch, prompt), params)
        engine.saver.close()
        context = length + answer + 16
        stay = {"max_running": samples, "kv_tokens": samples * context, "max_context_len": context}
        stay["prefix_cache"] = True
        for how, tiers in (("keep", KVTiers(host_ratio=1.0)), ("recompute", None)):
            engine = build(scale, folder, shape, tiers=tiers, **stay)
            figures |= interrupts(engine, prompts(engine, samples, length), params, how)
            engine.saver.close()
    return figures


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--shape", default="qwen2.5-0.5b", help="as a recipe's model.shape")
    args = options.parse_args(arguments)
    figures = measure(make_scale(args), args.shape)
    rows = [[name, value] for name, value in figures.items()]
    report("bench_async", [args.shape, ""], rows, figures, args.out)


if __name__ == "__main__":
    main()
