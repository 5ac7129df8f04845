"""Decode steps at the Qwen2.5-0.5B shape: what the host needs, and for how long the device waits.

`make bench-rollout`. For each number of samples, with steps one after the other (depth 0) and
launched before the last results are read (depth 1): milliseconds of a step, of the slowest one, of
the host's wait for the device, and of the device's idleness between the end of a step's work and
the begin of the next one's, which events on the engine's stream measure. The floor is the device's
own work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import make_scale, parser, random_model, report
from rollout import Engine, SamplingParams
from rollout.ops.token_sampling import Sent

WARMUP = 8  # steps


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


def measure(engine: Engine, clock: Clock, samples: int, depth: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a decode step of `samples` samples."""
    engine.steps.depth = depth
    torch.manual_seed(0)
    prompts = torch.randint(engine.model.vocab_size, (samples, engine.max_context_len // 4))
    params = SamplingParams(max_tokens=3 * prompts.shape[1], temperature=1.0, ignore_eos=True)
    for tokens in prompts.tolist():
        engine.submit(tokens, params, stream=False)
    scheduler = engine.scheduler
    while scheduler.waiting or not all(sample.prefilled for sample in scheduler.running):
        assert not engine.step(), "a sample ended before the first measured step"
    for _ in range(WARMUP):
        engine.step()
    clock.start()
    times = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        times.append(time.perf_counter())
    took = 1e3 * (times[-1] - times[0]) / steps
    slowest = 1e3 * max(then - first for first, then in pairwise(times))
    engine.drain()
    for request in engine.unfinished:
        engine.abort(request)
    engine.step()
    waited = 1e3 * clock.waited / steps
    figures = {"step": took, "slowest": slowest}
    figures |= {"host waits": waited, "host works": took - waited}
    if clock.begun:
        figures |= {"device idle": clock.idle_ms(), "device works": clock.busy_ms()}
    return figures


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(arguments)
    scale = make_scale(args)
    sizes, length = ((2, 4), 24) if scale.tiny else ((1, 64, 256, 1024), 900)
    steps, results = scale.choose(100, 3), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        random_model(scale, Path(folder), "qwen2.5-0.5b", torch.bfloat16)
        engine = Engine.from_pretrained(
            folder, device=scale.device, dtype=torch.bfloat16, max_running=sizes[-1],
            graph_batch_sizes=sizes, kv_tokens=sizes[-1] * (length + 40), max_context_len=length,
            prefix_cache=False,
        )  # fmt: skip
    clock = Clock(engine)
    for samples in sizes:
        for depth in (0, 1):
            name = f"{samples} samples, depth {depth}"
            results[name] = measure(engine, clock, samples, depth, steps)
    clock.restore()
    engine.saver.close()
    heads = ["step", "slowest", "host waits", "host works", "device idle", "device works"]
    rows = [[name, *(times.get(head, 0.0) for head in heads)] for name, times in results.items()]
    report("bench_steps", ["ms a step", *heads], rows, {"ms": results}, args.out)


if __name__ == "__main__":
    main()
