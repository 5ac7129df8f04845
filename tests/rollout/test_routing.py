"""Recorded experts of an answer's tokens equal the choices of transformers' routers.

This holds for requests that are chunked, preempted, paused or served from the prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import Completion, Engine, SamplingParams
from tests.helpers.models import DEEPSEEK_MOE, MLA, RELEASE, build_tiny
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.saved import Saved
from tests.helpers.routers import chosen_experts

# Triton's interpreter
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")
MOE: dict[str, Any] = {
    "num_experts": 12, "num_experts_per_tok": 3, "num_hidden_layers": 3, "mlp_only_layers": [1],
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=7, ignore_eos=True)
Make = Callable[..., tuple[Engine, Any]]


@pytest.fixture
def make(saved: Saved, device: str) -> Make:
    def make(**fields: Any) -> tuple[Engine, Any]:
        path, model = saved("qwen3_moe", **MOE)
        usual = {"kv_tokens": 1024, "page_size": 4, "max_prefill_tokens": 16}
        fields = {"device": device, "return_routed_experts": True, **usual, **fields}
        return Engine.from_pretrained(path, **fields), model

    return make


def check(
    model: Any, prompts: list[list[int]], out: list[list[Completion]], known: int | None = None
) -> None:
    """Compare the recorded experts with transformers'.

    Args:
        model: Model of transformers.
        prompts: Prompts of the call.
        out: Answers to the prompts.
        known: Number of tokens with recorded experts, counted from the last but one; None for all.
    """
    for prompt, samples in zip(prompts, out, strict=True):
        for sample in samples:
            recorded = sample.routed_experts
            assert recorded is not None and recorded.dtype == np.uint8
            tokens = [*prompt, *sample.token_ids][:-1]
            count = len(tokens) if known is None else known
            expected = chosen_experts(model, tokens)[-count:]
            assert np.sort(recorded).tolist() == expected.sort().values.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "torch", "prefix_cache": False},
        {"kv_tokens": 128},  # samples are preempted and computed again
        {"max_running": 3},
    ],
)
def test_recorded_experts_equal_transformers(make: Make, fields: dict[str, Any]) -> None:
    # steps mix chunks of prompts with decode of samples that share a prompt
    engine, model = make(**fields)
    prompts = random_prompts((1, 5, 40, 16, 70))
    out = engine.generate(prompts, PARAMS)
    check(model, prompts, out)
    assert (engine.scheduler.preemptions > 0) == ("kv_tokens" in fields)


def test_recorded_experts_of_single_layer_belong_to_right_tokens(saved: Saved, device: str) -> None:
    # a buffer with one row is contiguous for any order of its dimensions
    path, model = saved("qwen3_moe", **{**MOE, "num_hidden_layers": 2})
    engine = Engine.from_pretrained(path, device=device, return_routed_experts=True)
    prompts = random_prompts((1, 5, 40))
    check(model, prompts, engine.generate(prompts, PARAMS))


@pytest.mark.skipif(RELEASE < (5, 13), reason="transformers reports no experts of DeepSeek models")
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_routing_with_groups_and_biases_equals_transformers(
    saved: Saved, kind: str, device: str
) -> None:
    overrides = {**MLA, **DEEPSEEK_MOE, "topk_method": "group_limited_greedy"}
    path, model = saved(kind, **overrides)
    engine = Engine.from_pretrained(path, device=device, return_routed_experts=True)
    prompts = random_prompts((1, 40))
    check(model, prompts, engine.generate(prompts, PARAMS))


def test_recorded_experts_survive_pause(make: Make) -> None:
    engine, model = make()

    def pause(done: int, _total: int, tokens: int) -> None:
        if not done and tokens > 9 and not engine.scheduler.preemptions:
            engine.sleep(unfinished="recompute")
            engine.wake_up()

    prompts = random_prompts((9, 30, 4))
    check(model, prompts, engine.generate(prompts, PARAMS, on_progress=pause))
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_recorded_experts_survive_failed_steps(
    make: Make, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """On a GPU, the experts of such a step are still under way when it fails."""
    engine, model = make()
    engine.steps.depth = depth
    usual, calls = engine.runner.sample, itertools.count()

    def sample(*given: Any) -> Any:
        if next(calls) in (1, 5, 9):
            raise RuntimeError("out of memory")
        return usual(*given)

    monkeypatch.setattr(engine.runner, "sample", sample)
    prompts = random_prompts((9, 30, 4))
    check(model, prompts, engine.generate(prompts, PARAMS))
    assert next(calls) > 10


def test_recorded_experts_exclude_cached_tokens(make: Make) -> None:
    engine, model = make()
    prompts = random_prompts((41,))
    check(model, prompts, engine.generate(prompts, PARAMS))
    again = engine.generate(prompts, PARAMS)
    check(model, prompts, again, known=1 + PARAMS.max_tokens - 1)  # 40 tokens fill whole pages


def test_beams_and_engines_without_the_option_record_no_experts(make: Make) -> None:
    for asked, beams in ((False, 1), (True, 2)):
        engine, _ = make(return_routed_experts=asked)
        params = SamplingParams(max_tokens=4, temperature=0, beam_width=beams)
        assert engine.generate([[1, 2]], params)[0][0].routed_experts is None


def test_recorded_experts_are_int16_for_more_than_256_experts(tmp_path: Path, device: str) -> None:
    model = build_tiny("qwen3_moe", **MOE | {"num_experts": 300, "moe_intermediate_size": 4})
    model.save_pretrained(str(tmp_path))
    engine = Engine.from_pretrained(tmp_path, device=device, return_routed_experts=True)
    (prompt,) = random_prompts((30,))
    ((sample,),) = engine.generate([prompt], SamplingParams(max_tokens=2, temperature=0))
    recorded = sample.routed_experts
    assert recorded is not None and recorded.dtype == np.int16 and int(recorded.max()) > 255
    expected = chosen_experts(model, [*prompt, *sample.token_ids][:-1])
    assert torch.equal(torch.from_numpy(recorded).long(), expected)
