"""Steps of the engine: what the host needs, and for how long the device waits.

`make bench-rollout`, at the Qwen2.5-0.5B shape. For each number of samples, with steps one after
the other (depth 0) and launched before the last results are read (depth 1): milliseconds of a step,
of the slowest one, of the host's wait for the device, and of the device's idleness between the end
of a step's work and the begin of the next one's, which events on the engine's stream measure. The
floor is the device's own work. A second table has the time between two tokens of 64 samples while
64 prompts of 8,192 tokens are computed beside them, by `EngineConfig.mixed_prefill_tokens`.

`--busy N` measures the first table beside N busy processes for each core of this process:

    python -m benchmarks.bench_steps --shape qwen2.5-7b --busy 2
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Scale, fields_of, make_scale, parser, report, write_config
from benchmarks.vllm_side import draw_weights
from rollout import Engine, SamplingParams
from rollout.ops.token_sampling import Sent

WARMUP = 8  # steps
BUSY = "while True: pass"


class Clock:
    """Times the steps of an engine, whose methods it wraps."""

    def __init__(self, engine: Engine) -> None:
        self.begun: list[Any] = []  # events before each step's first kernel
        self.ended: list[Any] = []  # after its last
        self.waited = 0.0  # seconds that the host has waited for results
        runner, arrays = engine.runner, Sent.arrays
        forward, sample = runner.forward, runner.sample

        def timed_forward(step: Any) -> Any:
            self._note(self.begun)
            return forward(step)

        def timed_sample(*given: Any) -> Any:
            sent = sample(*given)
            self._note(self.ended)
            return sent

        def timed_arrays(sent: Sent) -> Any:
            start = time.perf_counter()
            if sent.copied is not None:
                sent.copied.synchronize()
            self.waited += time.perf_counter() - start
            return arrays(sent)

        runner.forward, runner.sample = timed_forward, timed_sample  # type: ignore[method-assign]
        Sent.arrays = timed_arrays  # type: ignore[method-assign]
        self.restore = lambda: setattr(Sent, "arrays", arrays)

    def _note(self, events: list[Any]) -> None:
        if torch.cuda.is_available():
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    def start(self) -> None:
        self.begun.clear()
        self.ended.clear()
        self.waited = 0.0

    def idle_ms(self) -> float:
        """Return the mean time between the end of a step and the begin of the next."""
        pairs = zip(self.ended, self.begun[1:], strict=False)
        return statistics.fmean([end.elapsed_time(begin) for end, begin in pairs] or [0.0])

    def busy_ms(self) -> float:
        """Return the mean time of a step's work on the device."""
        pairs = zip(self.begun, self.ended, strict=True)
        return statistics.fmean([begin.elapsed_time(end) for begin, end in pairs] or [0.0])


def build(scale: Scale, folder: str, shape: str, **config: Any) -> Engine:
    """Build an engine with small random weights."""
    write_config(Path(folder), fields_of(scale, shape))
    options = {"load_weights": False, "prefix_cache": False, **config}
    engine = Engine.from_pretrained(folder, scale.device, dtype=torch.bfloat16, **options)
    draw_weights(engine, folder)
    return engine


@contextlib.contextmanager
def busy_host(processes: int) -> Iterator[None]:
    """Run busy processes beside the block."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def submit(engine: Engine, samples: int, prompt: int, answer: int) -> None:
    prompts = torch.randint(engine.model.vocab_size, (samples, prompt))
    params = SamplingParams(max_tokens=answer, temperature=1.0, ignore_eos=True)
    for tokens in prompts.tolist():
        engine.submit(tokens, params, stream=False)


def run_steps(engine: Engine, steps: int) -> list[float]:
    """Run steps, and return the milliseconds of each."""
    times = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        times.append(time.perf_counter())
    return [1e3 * (then - first) for first, then in pairwise(times)]


def begin_answers(engine: Engine) -> None:
    """Run steps until all prompts are computed, and a few more."""
    scheduler = engine.scheduler
    while scheduler.waiting or not all(sample.prefilled for sample in scheduler.running):
        assert not engine.step(), "a sample ended before the first measured step"
    run_steps(engine, WARMUP)


def end_all(engine: Engine) -> None:
    for request in engine.unfinished:
        engine.abort(request)
    engine.step()


def measure(engine: Engine, clock: Clock, samples: int, depth: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a decode step of `samples` samples."""
    engine.steps.depth = depth
    torch.manual_seed(0)
    prompt = engine.max_context_len // 4
    submit(engine, samples, prompt, 3 * prompt)
    begin_answers(engine)
    clock.start()
    times = run_steps(engine, steps)
    took = statistics.fmean(times)
    engine.drain()
    end_all(engine)
    waited = 1e3 * clock.waited / steps
    figures = {"step": took, "slowest": max(times)}
    figures |= {"host waits": waited, "host works": took - waited}
    if clock.begun:
        figures |= {"device idle": clock.idle_ms(), "device works": clock.busy_ms()}
    return figures


def decode_steps(scale: Scale, shape: str) -> dict[str, dict[str, float]]:
    """Return the milliseconds of decode steps by number of samples and depth."""
    sizes, length = ((2, 4), 24) if scale.tiny else ((1, 64, 256, 1024), 900)
    results = dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        engine = build(
            scale, folder, shape, max_running=sizes[-1], graph_batch_sizes=sizes,
            kv_tokens=sizes[-1] * (length + 40), max_context_len=length,
        )  # fmt: skip
        clock = Clock(engine)
        for samples in sizes:
            for depth in (0, 1):
                name = f"{samples} samples, depth {depth}"
                results[name] = measure(engine, clock, samples, depth, scale.choose(100, 3))
        clock.restore()
        engine.saver.close()
    return results


def steps_beside_prompts(scale: Scale, shape: str) -> dict[str, dict[str, float]]:
    """Return the milliseconds of steps of decoding samples, without and beside prompts."""
    samples, prompt = scale.choose((64, 8192), (2, 32))
    results = dict[str, dict[str, float]]()
    for tokens in scale.choose((8192, 1024, 512, 256), (32, 8)):
        with tempfile.TemporaryDirectory() as folder:
            engine = build(
                scale, folder, shape, max_running=2 * samples, max_context_len=2 * prompt,
                kv_tokens=3 * samples * prompt, max_prefill_tokens=prompt,
                mixed_prefill_tokens=tokens,
            )  # fmt: skip
            submit(engine, samples, prompt // 8, prompt)
            begin_answers(engine)
            alone, beside = run_steps(engine, scale.choose(100, 3)), []
            submit(engine, samples, prompt, 1)
            while len(engine.unfinished) > samples:
                beside += run_steps(engine, 1)
            results[f"{tokens} tokens beside"] = {
                "alone": statistics.median(alone),
                "beside": statistics.median(beside),
                "slowest": max(beside),
                "prompt tokens a second": 1e3 * samples * prompt / sum(beside),
            }
            end_all(engine)
            engine.saver.close()
    return results


def table(head: str, results: dict[str, dict[str, float]], columns: list[str]) -> Any:
    rows = [
        [name, *(times.get(column, 0.0) for column in columns)] for name, times in results.items()
    ]
    return [head, *columns], rows


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--shape", default="qwen2.5-0.5b", help="as a recipe's model.shape")
    options.add_argument("--busy", type=int, default=0, help="busy processes for each core")
    args = options.parse_args(arguments)
    scale = make_scale(args)
    with busy_host(args.busy * len(os.sched_getaffinity(0))):
        decode = decode_steps(scale, args.shape)
    columns = ["step", "slowest", "host waits", "host works", "device idle", "device works"]
    results = {"ms": decode}
    report("bench_steps", *table("ms a step", decode, columns), results, args.out)
    if not args.busy:
        results["beside"] = beside = steps_beside_prompts(scale, args.shape)
        columns = ["alone", "beside", "slowest", "prompt tokens a second"]
        report("bench_steps", *table("ms between tokens", beside, columns), results, args.out)


if __name__ == "__main__":
    main()
