"""Which experts an answer's tokens went to: those of transformers' routers over prompt and answer,
whatever happened to the request on its way.
"""

from __future__ import annotations

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
    """known: tokens before an answer's last of which the experts came; None: all."""
    for prompt, samples in zip(prompts, out, strict=True):
        for sample in samples:
            found = sample.routed_experts
            assert found is not None and found.dtype == np.uint8
            tokens = [*prompt, *sample.token_ids][:-1]
            count = len(tokens) if known is None else known
            expected = chosen_experts(model, tokens)[-count:]
            assert np.sort(found).tolist() == expected.sort().values.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "torch", "prefix_cache": False},
        {"kv_tokens": 128},  # samples are preempted, and computed again
        {"max_running": 3},
    ],
)
def test_they_are_those_of_transformers(make: Make, fields: dict[str, Any]) -> None:
    """Prompts in chunks beside samples that decode, which share their prompt."""
    engine, model = make(**fields)
    prompts = random_prompts((1, 5, 40, 16, 70))
    out = engine.generate(prompts, PARAMS)
    check(model, prompts, out)
    assert (engine.scheduler.preemptions > 0) == ("kv_tokens" in fields)


def test_one_layer_of_experts_is_recorded_for_its_own_tokens(saved: Saved, device: str) -> None:
    """A buffer with one row is contiguous in any order of its dimensions."""
    path, model = saved("qwen3_moe", **{**MOE, "num_hidden_layers": 2})
    engine = Engine.from_pretrained(path, device=device, return_routed_experts=True)
    prompts = random_prompts((1, 5, 40))
    check(model, prompts, engine.generate(prompts, PARAMS))


@pytest.mark.skipif(RELEASE < (5, 13), reason="transformers tells no experts of DeepSeek models")
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_groups_and_biases_choose_as_in_transformers(saved: Saved, kind: str, device: str) -> None:
    overrides = {**MLA, **DEEPSEEK_MOE, "topk_method": "group_limited_greedy"}
    path, model = saved(kind, **overrides)
    engine = Engine.from_pretrained(path, device=device, return_routed_experts=True)
    prompts = random_prompts((1, 40))
    check(model, prompts, engine.generate(prompts, PARAMS))


def test_a_pause_keeps_them(make: Make) -> None:
    engine, model = make()

    def pause(done: int, _total: int, tokens: int) -> None:
        if not done and tokens > 9 and not engine.scheduler.preemptions:
            engine.sleep(unfinished="preempt")
            engine.wake_up()

    prompts = random_prompts((9, 30, 4))
    check(model, prompts, engine.generate(prompts, PARAMS, on_progress=pause))
    assert engine.scheduler.preemptions > 0


def test_what_a_cache_had_is_not_among_them(make: Make) -> None:
    engine, model = make()
    prompts = random_prompts((41,))
    check(model, prompts, engine.generate(prompts, PARAMS))
    again = engine.generate(prompts, PARAMS)
    check(model, prompts, again, known=1 + PARAMS.max_tokens - 1)  # 40 tokens lie in whole pages


def test_beams_and_engines_that_are_not_asked_have_none(make: Make) -> None:
    for asked, beams in ((False, 1), (True, 2)):
        engine, _ = make(return_routed_experts=asked)
        params = SamplingParams(max_tokens=4, temperature=0, beam_width=beams)
        assert engine.generate([[1, 2]], params)[0][0].routed_experts is None


def test_numbers_past_256_experts_are_wider(tmp_path: Path, device: str) -> None:
    model = build_tiny("qwen3_moe", **MOE | {"num_experts": 300, "moe_intermediate_size": 4})
    model.save_pretrained(str(tmp_path))
    engine = Engine.from_pretrained(tmp_path, device=device, return_routed_experts=True)
    (prompt,) = random_prompts((30,))
    ((sample,),) = engine.generate([prompt], SamplingParams(max_tokens=2, temperature=0))
    found = sample.routed_experts
    assert found is not None and found.dtype == np.int16 and int(found.max()) > 255
    expected = chosen_experts(model, [*prompt, *sample.token_ids][:-1])
    assert torch.equal(torch.from_numpy(found).long(), expected)
