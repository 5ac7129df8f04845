"""Steps that are launched before earlier results are read answer as steps one after the other do.

The results stay hidden for one step, or for two, and each last token is wiped after it was read: a
token that is used twice, or before it is there, changes an answer.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.allocators import Int64Array
from rollout import Completion, Engine, KVTiers, Output, SamplingParams
from rollout.running.graph_inputs import GraphInputs
from rollout.scheduling.samples import Step
from tests.helpers.models import MLA
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.updates import checkpoint, update

CROWDED: dict[str, Any] = {"kv_tokens": 112, "max_running": 12, "max_prefill_tokens": 16}
ROOMY: dict[str, Any] = {"kv_tokens": 512, "max_running": 8, "max_prefill_tokens": 24}
SWAP = KVTiers(host_ratio=6.0, preemption="swap")
Request = tuple[int, list[int], SamplingParams]  # (step before which it comes, prompt, parameters)


def overlapped(engine: Engine, depth: int) -> Engine:
    engine.steps.depth = depth
    usual, last_tokens = engine.runner.forward, engine.runner.last_tokens

    def forward(step: Step) -> torch.Tensor:
        read = last_tokens[step.rows].clone()
        last_tokens.fill_(1)
        last_tokens[step.rows] = read
        logits = usual(step).clone()  # two steps may be hidden
        if engine.graphs is None:  # a graph has written the next tokens already
            last_tokens.fill_(1)
        return logits

    engine.runner.forward = forward  # type: ignore[method-assign]
    return engine


def draw(rng: random.Random, earlier: list[list[int]], together: bool) -> list[Request]:
    """Draw prompts of which many begin alike, and some continue earlier answers."""
    common = [rng.randrange(199) for _ in range(rng.choice((0, 20, 40)))]
    prompts = [common + [rng.randrange(199) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    prompts += [[*turn, rng.randrange(199)] for turn in rng.sample(earlier, min(len(earlier), 4))]
    return [
        (
            0 if together else rng.randrange(12),
            prompt,
            SamplingParams(
                max_tokens=rng.randint(1, 20),
                temperature=rng.choice((0, 1.0, 0.7)),
                top_k=rng.choice((0, 0, 5)),
                n=rng.choice((1, 1, 3)),
                seed=rng.randrange(10**6),
                stop_token_ids=() if together else tuple(rng.sample(range(199), 12)),
                forced=(7,) if rng.random() < 0.2 else (),
            ),
        )
        for prompt in prompts
    ]


def run(engine: Engine, requests: list[Request], naps: dict[int, str]) -> list[list[Completion]]:
    """Submit each request before its step; sleep, or lose the cache, before some steps."""
    numbers, parts = dict[int, int](), defaultdict[tuple[int, int], list[Output]](list)
    number = 0
    while len(numbers) < len(requests) or engine.unfinished:
        for index, (due, prompt, params) in enumerate(requests):
            if due == number:
                numbers[engine.submit(prompt, params, stream=index % 2 == 0)] = index
        if naps.get(number) == "sleep":
            engine.sleep(unfinished="recompute")
            engine.wake_up()
        elif number in naps:  # another user of the saver
            engine.saver.pause("kv_cache", content="discard")
            engine.saver.resume("kv_cache")
        outputs = engine.step()
        assert engine.unfinished or not engine.steps.under_way
        for output in outputs:
            parts[numbers[output.id], output.sample].append(output)
        engine.check_integrity()
        number += 1
    return [
        [Completion.joined(parts[index, sample]) for sample in range(params.n)]
        for index, (_, _, params) in enumerate(requests)
    ]


def told(answer: Completion) -> Completion:
    return replace(answer, routed_experts=None)


def check_experts(expected: Completion, actual: Completion) -> None:
    """Compare experts; a sample that was admitted later may have found more tokens cached."""
    pair = [answer.routed_experts for answer in (expected, actual)]
    if pair[0] is not None and pair[1] is not None:
        known = min(map(len, pair))
        assert known >= len(actual.token_ids) - 1
        np.testing.assert_array_equal(*(experts[len(experts) - known :] for experts in pair))
    else:
        assert pair == [None, None]


@pytest.mark.parametrize(
    ("depth", "kind", "model", "options"),
    [
        (1, "qwen3", {}, CROWDED),
        (1, "qwen3", {}, {**CROWDED, "tiers": SWAP}),
        (1, "qwen3", {}, {**ROOMY, "elastic": True, "mixed_prefill_tokens": 8}),
        (1, "mistral", {"sliding_window": 24}, ROOMY),
        (2, "qwen3_moe", {}, {**CROWDED, "return_routed_experts": True}),
        (1, "deepseek_v3", MLA, {"kv_tokens": 4096, "max_running": 64}),
        (1, "qwen3_next", {}, {"kv_tokens": 4096, "max_running": 64}),
    ],
    ids=["recompute", "swap", "elastic", "window", "experts", "latent", "states"],
)
def test_answers_do_not_depend_on_when_results_are_read(
    depth: int, kind: str, model: dict[str, Any], options: dict[str, Any], saved: Saved, device: str
) -> None:
    # With 199 tokens, the bits of a few GPU logits in 10^5 depend on the number of rows.
    path: Path = saved(kind, vocab_size=199 if device == "cpu" else 200, **model)[0]
    common: dict[str, Any] = {"device": device, "page_size": 4, **options}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    plain, ahead = (Engine.from_pretrained(path, dtype=dtype, **common) for _ in range(2))
    plain.steps.depth = 0
    overlapped(ahead, depth)
    rng, earlier = random.Random(f"{kind} {depth}"), list[list[int]]()
    # On the CPU, the bits of these depend on the batch.
    together = kind in ("deepseek_v3", "qwen3_next")
    for _ in range(4):
        requests = draw(rng, earlier, together)
        naps = {} if together else {rng.randrange(2, 9): "sleep", rng.randrange(9, 16): "loss"}
        expected, actual = (run(engine, requests, naps) for engine in (plain, ahead))
        assert [[*map(told, group)] for group in actual] == [
            [*map(told, group)] for group in expected
        ]
        for group in zip(expected, actual, strict=True):
            for pair in zip(*group, strict=True):
                check_experts(*pair)
        turns = zip(requests, expected, strict=True)
        earlier += [prompt + group[0].token_ids for (_, prompt, _), group in turns][:6]
        earlier = [turn for turn in earlier if len(turn) < 70]
    for engine in (plain, ahead):
        stats = engine.stats
        engine.saver.close()
        if options["kv_tokens"] == 112 and device == "cpu":  # answers of a GPU need other pages
            swaps = stats.preempted_swap, stats.swapped_back
            preempted = min(swaps) if "tiers" in options else stats.preempted_recompute
            assert min(preempted, stats.prefix_hit_tokens) > 0, stats


def begin(engine: Engine) -> None:
    update(engine, 1, seed=1, in_flight="keep")


def commit(engine: Engine) -> None:
    update(engine, 1, seed=1, shadow=True, in_flight="keep")


def fail(engine: Engine) -> None:
    def stop(*_: int) -> None:
        raise ZeroDivisionError

    engine.abort(0)
    while engine.unfinished:
        engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.generate([[5, 3]], SamplingParams(max_tokens=9), on_progress=stop)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.drain(),
        lambda engine: engine.abort(0),
        lambda engine: engine.sleep(unfinished="recompute"),
        lambda engine: engine.load(checkpoint(), in_flight="keep"),
        lambda engine: engine.abort_update("a test"),
        begin,
        commit,
        fail,
    ],
    ids=["drain", "abort", "sleep", "load", "abort_update", "begin", "commit", "generate"],
)
def test_calls_that_need_the_results_leave_nothing_under_way(call: Callable[[Engine], Any]) -> None:
    engine = overlapped(Engine.from_pretrained(checkpoint(), kv_tokens=128), 1)
    engine.submit([5, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    assert len(engine.steps.under_way) == 1
    call(engine)
    assert not engine.steps.under_way
    engine.check_integrity()


def test_call_that_refuses_running_requests_first_reads_their_ends() -> None:
    engine = overlapped(Engine.from_pretrained(checkpoint(), kv_tokens=128), 1)
    engine.submit([5, 3], SamplingParams(max_tokens=1))
    assert engine.step() == []
    engine.sleep()
    (output,) = engine.step()
    assert (output.finish_reason, len(output.token_ids)) == ("length", 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_whose_results_were_lost_are_chosen_again(depth: int) -> None:
    engine = Engine.from_pretrained(checkpoint(), kv_tokens=256)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    expected = engine.generate([[5, 3], [7]], params)
    overlapped(engine, depth)
    usual, calls = engine.scheduler.receive, count()

    def receive(*results: Any) -> None:
        if next(calls) == 4:
            raise RuntimeError("the device failed")
        usual(*results)

    engine.scheduler.receive = receive  # type: ignore[method-assign]
    assert engine.generate([[5, 3], [7]], params) == expected
    assert next(calls) > 12


def test_number_of_python_calls_of_a_decode_step_does_not_depend_on_its_samples() -> None:
    def calls(samples: int) -> int:
        engine = Engine.from_pretrained(checkpoint(), kv_tokens=8192, max_running=64)
        engine.steps.depth = 1
        for seed in range(samples):
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)
            engine.submit([seed, 3, 5], params, stream=False)
        for _ in range(8):
            engine.step()
        logits, counted = torch.zeros(samples, engine.model.vocab_size), 0
        engine.runner.forward = lambda _: logits  # type: ignore[method-assign]

        def note(_: object, event: str, __: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            for _ in range(16):  # of a page
                engine.step()
        finally:
            sys.setprofile(None)
        return counted

    assert calls(64) == calls(8)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_steady_decode_steps_neither_wait_for_the_device_nor_reserve_its_memory(
    cuda_graphs: bool, saved: Saved
) -> None:
    options: dict[str, Any] = {"return_routed_experts": True, "cuda_graphs": cuda_graphs}
    engine = Engine.from_pretrained(
        saved("qwen3_moe")[0], "cuda:0", torch.bfloat16, kv_tokens=2048, **options
    )
    for seed in range(8):
        kind: dict[str, Any] = {"top_p": 0.9} if seed % 2 else {"forced": (3, 4, 5)}
        params = SamplingParams(max_tokens=90, temperature=1.0, seed=seed, ignore_eos=True, **kind)
        engine.submit([seed, 3, 5], params, stream=False)
    for _ in range(20):
        engine.step()
    reserved = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == reserved
    assert len(engine.steps.under_way) == 1
    while engine.unfinished:
        assert all(len(output.token_ids) == 90 for output in engine.step())
    engine.saver.close()


@pytest.mark.gpu
def test_graph_goes_on_with_its_rows_without_inputs(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(saved("qwen3")[0], "cuda:0", torch.bfloat16, kv_tokens=2048)
    for seed in range(8):
        params = SamplingParams(max_tokens=90, temperature=1.0, seed=seed, ignore_eos=True)
        engine.submit([seed, 3, 5], params, stream=False)
    for _ in range(20):
        engine.step()
    sent = list[Int64Array]()
    monkeypatch.setattr(GraphInputs, "send", lambda _, values: sent.append(values))
    for _ in range(50):
        engine.step()
    assert engine.graphs is not None and engine.graphs.replays > 50 and not sent
    monkeypatch.undo()
    while engine.unfinished:
        assert all(len(output.token_ids) == 90 for output in engine.step())
    engine.saver.close()
