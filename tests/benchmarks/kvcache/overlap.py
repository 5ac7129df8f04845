"""A cached prefix comes back from the host while the tokens behind it are computed: how much of the
load is hidden.

Qwen2.5-7B's shape in bf16 with random weights; one prompt, so that a step has one load. On a GPU a
trace of one step shows which layers were loaded and computed at the same time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from rollout import Engine, KVTiers, SamplingParams
from rollout.serving.tiers import TieredBlocks
from tests.benchmarks.common import Figure, Figures, Scale, Times, figures
from tests.benchmarks.kvcache import trace
from tests.benchmarks.kvcache.engines import random_engine

ANSWER = 8  # tokens that are compared
LOAD, COMPUTE, BOTH = "load alone", "compute alone", "load and compute in one step"
Prompts = Iterator[list[int]]


def overlap(scale: Scale) -> Figures:
    """A prefix on the host with new tokens behind it, answers compared with those of an engine
    without tiers.
    """
    # no copies out in the steps that are measured
    tiers = KVTiers(host_ratio=1.5, write_policy="write_back")
    with _engine(scale, None) as plain:
        prefix, prompts = _prompts(scale, plain.model.vocab_size)
        first = next(prompts)
        _answer(plain, prefix)
        expected = _answer(plain, first, ANSWER)
    with _engine(scale, tiers) as engine:
        _answer(engine, prefix)
        engine.sleep(tags=["kv_cache"])
        engine.wake_up(["kv_cache"])
        assert _answer(engine, first, ANSWER) == expected, "other tokens than without tiers"
        assert engine.stats.loaded_tokens == len(prefix)
        found = _times(scale, engine, prefix, prompts)
        if scale.on_gpu:
            try:
                found += _trace(scale, engine, next(prompts))
            except Exception as error:  # such as kernels that have other names
                error.add_note(f"measured before: {found}")
                raise
    return found


def _engine(scale: Scale, tiers: KVTiers | None) -> AbstractContextManager[Engine]:
    prefix, tail = _lengths(scale)
    return random_engine(
        scale, "7b", kv_tokens=prefix + 16 * tail, max_prefill_tokens=8192, tiers=tiers
    )


def _lengths(scale: Scale) -> tuple[int, int]:
    """Tokens of the prefix and behind it: a layer's load, 48 MiB, takes an H100 somewhat longer
    than its compute, so that compute follows loads closely.
    """
    return scale.choose(24_576, 64), scale.choose(64, 16)


def _prompts(scale: Scale, vocabulary: int) -> tuple[list[int], Prompts]:
    """The prefix, and prompts that begin with it, each with other tokens behind."""
    prefix, tail = _lengths(scale)
    dice = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=dice).tolist()

    common = draw(prefix)
    return common, iter(lambda: common + draw(tail), None)


def _blocks(engine: Engine) -> TieredBlocks:
    assert isinstance(engine.prefixes, TieredBlocks)
    return engine.prefixes


def _answer(engine: Engine, prompt: list[int], tokens: int = 1) -> list[int]:
    """One token is one step, which ends with it on the host."""
    ((completion,),) = engine.generate([prompt], SamplingParams(max_tokens=tokens, temperature=0))
    return completion.token_ids


def _times(scale: Scale, engine: Engine, prefix: list[int], prompts: Prompts) -> Figures:
    """By turns. Steps from the call of `generate` to its answer, loads by the events of their
    stream.
    """
    blocks, before, times = _blocks(engine), engine.stats, Times()
    for _ in times.rounds:
        blocks.move_below(keep=True)  # what a sleep does before it gives memory back
        times(BOTH, partial(_answer, engine, next(prompts)))
        blocks.move_below(keep=True)
        load = blocks.tiers.match_prefix(prefix).transfer
        load.synchronize()
        times.rows[LOAD].append(load.seconds * 1e3)
        times(COMPUTE, partial(_answer, engine, next(prompts)))
    rounds, now = len(times.rounds), engine.stats
    assert now.loaded_tokens - before.loaded_tokens == rounds * len(prefix), (
        "other steps than meant"
    )
    assert now.computed_tokens - before.computed_tokens == 2 * rounds * _lengths(scale)[1], (
        "other steps than meant"
    )
    ms = times.medians
    share = ms[BOTH] / (ms[LOAD] + ms[COMPUTE])
    return [
        *figures(ms),
        Figure(what="in one step, of one after the other", value=share, unit="x", target="< 1"),
    ]


def _trace(scale: Scale, engine: Engine, prompt: list[int]) -> Figures:
    """AssertionError unless most layers are loaded while an earlier one is computed; the trace is
    kept even then.
    """
    _blocks(engine).move_below(keep=True)
    layers = engine.model.num_layers
    with tempfile.TemporaryDirectory() as folder:
        path = (scale.out or Path(folder)) / "load_overlap.json"
        trace.record(lambda: _answer(engine, prompt), path)
        loads, computes = trace.read(path, layers)
        if scale.out is not None:
            trace.draw(scale.out / "load_overlap.png", loads, computes)
    found = trace.figures(loads, computes)
    beside = found[0].value
    assert scale.tiny or beside >= layers // 2, (
        f"only {beside:.0f} of {layers} layers were loaded beside compute"
    )
    return found
