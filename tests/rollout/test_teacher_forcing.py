"""A known sequence in an engine has the log-probabilities of a sampled one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout import Engine, SamplingParams
from rollout.teacher_forcing import teacher_forced
from tests.helpers.models import save_tiny

PROMPT = [17, 3, 190, 44, 8]
HEAT = 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_answer_gets_the_log_probabilities_of_a_drawn_one(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama")
    engine = Engine.from_pretrained(tmp_path, dtype=dtype, max_prefill_tokens=3)
    asked = SamplingParams(max_tokens=20, temperature=HEAT, n=4, seed=1)
    (answers,) = engine.generate([PROMPT], asked)
    for answer in answers:
        scores = teacher_forced(engine, PROMPT, answer.token_ids, HEAT, lambda *_: None)
        assert scores == answer.logprobs
    started = replace(asked, forced=answers[2].token_ids[:7])
    for one, other in zip(engine.generate([PROMPT], started)[0], answers, strict=True):
        assert one.token_ids[:7] == answers[2].token_ids[:7]
        assert one.logprobs[:7] == answers[2].logprobs[:7]
        assert (one == other) == (other is answers[2]), "later tokens are drawn as before"


def test_unlikely_tokens_are_scored_and_listeners_get_their_logits(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    engine = Engine.from_pretrained(tmp_path)
    response, logits, cold = list(range(199)), [], 0.3

    def listen(operation: str, result: torch.Tensor) -> None:
        if operation == "lm_head":
            logits.append(result)

    logprobs = teacher_forced(engine, PROMPT, response, cold, listen)
    wanted = (torch.cat(logits).double() / cold).log_softmax(-1)
    wanted = wanted[range(199), response]
    assert wanted.min() < -20, "below 1e-7, the resolution of fp32 sums"
    torch.testing.assert_close(torch.tensor(logprobs).double(), wanted, rtol=1e-6, atol=1e-6)
