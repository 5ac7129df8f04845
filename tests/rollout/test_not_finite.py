"""NaN and infinity end a request with an error, and later requests do not share its pages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Completion, Engine, SamplingParams
from tests.helpers.case_selection import pairwise
from tests.helpers.models import save_tiny
from tests.helpers.rollout.answers import random_prompts

PROMPTS = random_prompts((40, 7))
KINDS = [
    SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=1, n=3, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=1, top_k=5, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=6, beam_width=2, ignore_eos=True),
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_tiny(tmp_path / "model", "qwen3")
    return str(tmp_path / "model")


def weight(engine: Engine, part: str) -> torch.Tensor:
    name = next(name for name in engine.store.shapes if part in name)
    return engine.store.tensor(name).view(-1)


@pytest.mark.parametrize(
    ("stored", "part", "value"),
    pairwise(
        ["auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"],
        ["down_proj", "k_proj", "v_proj"],
        [math.nan, math.inf],
    ),
)
def test_broken_weight_ends_every_kind_of_request_until_it_is_mended(
    path: str, stored: Any, part: str, value: float
) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=512, kv_cache_dtype=stored)
    expected = engine.generate(PROMPTS, KINDS[0])
    broken = weight(engine, part)
    kept = broken[3].clone()
    engine.prefixes.clear()
    for params in KINDS:
        broken[3] = value
        with pytest.raises(FloatingPointError, match=f"version 0: NaN or infinity in .*{part}"):
            engine.generate(PROMPTS, params)
        engine.check_integrity()
        # no page of the broken prompt is found again
        broken[3] = kept
        assert engine.generate(PROMPTS, KINDS[0]) == expected


def test_overflow_of_finite_weights_names_the_dtype(path: str) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=512, dtype=torch.float16)
    weight(engine, "v_proj").fill_(6e4)
    with pytest.raises(FloatingPointError, match="weights are finite, .* use dtype bfloat16"):
        engine.generate(PROMPTS, KINDS[0])


def test_broken_request_ends_alone_between_others(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=512)
    (alone,) = engine.generate([PROMPTS[1]], KINDS[1])
    usual = engine.runner.sample

    def sample(logits: torch.Tensor, at: Any, rows: Any) -> Any:
        sent = usual(logits, at, rows)
        sent = sent._replace(logprobs=sent.logprobs.clone())
        for row, sample in enumerate(map(engine.scheduler.rows.sample, rows)):
            if sample.prompt == PROMPTS[0] and sample.index == 1:
                sent.logprobs[row] = math.nan
        return sent

    monkeypatch.setattr(engine.runner, "sample", sample)
    first, second = (engine.submit(prompt, KINDS[1], stream=False) for prompt in PROMPTS[:2])
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    ends = {(output.id, output.sample): output for output in outputs}
    assert {ends[first, i].finish_reason for i in range(KINDS[1].n)} == {"error", "abort"}
    assert isinstance(ends[first, 1].error, FloatingPointError) and ends[first, 0].error is None
    assert [Completion.joined([ends[second, i]]) for i in range(KINDS[1].n)] == alone
    engine.check_integrity()
