"""Penalties, biases, masks and min_p against plain torch, and parameters that are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import Completion, Engine, KVTiers, SamplingParams
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.updates import tiny

LENGTH = 14
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
PROMPTS = random_prompts((5, 17, 30, 9, 22), seed=8)
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.5},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 3.0},
    "reward": {"presence_penalty": -1.0, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {7: 6.0, 12: -4.0, 190: 5.5}},
    "allowed": {"allowed_token_ids": tuple(range(3, 199, 11))},
    "bad": {},  # words of the plain answer
    "minimum": {"min_tokens": 9},  # with end tokens of the plain answer
    "all": {
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.4,
        "logit_bias": {9: 3.0, 15: -2.0}, "allowed_token_ids": tuple(range(150)), "min_tokens": 4,
    },
}  # fmt: skip


@torch.no_grad()
def reference(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[float]]:
    """Return the greedy answer, token by token, and the model's own log-probabilities."""
    answer: list[int] = []
    logprobs: list[float] = []
    stops = set(params.stop_token_ids or ())
    while len(answer) < params.max_tokens and not stops & set(answer[-1:]):
        logits = model(torch.tensor([prompt + answer])).logits[0, -1].float()
        own = torch.log_softmax(logits, -1)
        for token in range(len(logits)):
            if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
                logits[token] = -torch.inf
        for word in params.bad_words:
            if [*answer, word[-1]][-len(word) :] == list(word):
                logits[word[-1]] = -torch.inf
        if len(answer) < params.min_tokens:
            logits[list(stops)] = -torch.inf
        for token, bias in dict(params.logit_bias).items():
            logits[token] += bias
        for token in {*prompt, *answer}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in {*answer}:
            logits[token] -= params.presence_penalty
            logits[token] -= params.frequency_penalty * answer.count(token)
        answer.append(int(logits.argmax()))
        logprobs.append(float(own[answer[-1]]))
    return answer, logprobs


def case(name: str, prompt: list[int]) -> SamplingParams:
    """Return the parameters of a case; words and end tokens are taken from the plain answer."""
    plain, _ = reference(tiny(0), prompt, GREEDY)
    given = dict(CASES[name])
    if name == "bad":
        given = {"bad_words": (plain[:1], plain[3:5], plain[6:9])}
    elif name == "minimum":
        given["stop_token_ids"] = tuple(plain[2:4])
    return replace(GREEDY, **given)


@pytest.mark.parametrize(
    ("name", "kv_tokens"), [*((name, 1024) for name in CASES), ("bad", 104), ("all", 104)]
)
def test_greedy_answers_are_those_of_plain_torch(
    name: str, kv_tokens: int, path: Path, device: str
) -> None:
    """Batch requests with and without parameters, also in a pool that preempts them."""
    engine = Engine.from_pretrained(path, device, kv_tokens=kv_tokens, page_size=4)
    engine.steps.depth = 1
    params = [case(name, prompt) for prompt in PROMPTS[:4]] + [GREEDY]
    answers = engine.generate(PROMPTS, params, on_progress=lambda *_: engine.check_integrity())
    assert (engine.scheduler.preemptions > 0) == (kv_tokens < 1024)
    for prompt, own, (answer,) in zip(PROMPTS, params, answers, strict=True):
        tokens, logprobs = reference(tiny(0), prompt, own)
        assert answer.token_ids == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
    plain = [reference(tiny(0), prompt, GREEDY)[0] for prompt in PROMPTS[:4]]
    assert [answer.token_ids for (answer,) in answers[:4]] != plain  # the parameters matter


def test_min_p_leaves_out_tokens_below_a_share_of_the_likeliest(path: Path) -> None:
    engine, share, heat = Engine.from_pretrained(path), 0.4, 1.5
    params = SamplingParams(max_tokens=30, temperature=heat, seed=3, n=4, ignore_eos=True)
    for least in (0.0, share):
        below = 0
        (answers,) = engine.generate(PROMPTS[:1], replace(params, min_p=least))
        for answer in answers:
            ids = PROMPTS[0] + answer.token_ids
            with torch.no_grad():
                logits = tiny(0)(torch.tensor([ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
            probs = torch.softmax(logits.float() / heat, -1)
            drawn = probs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            below += int((drawn < share * probs.amax(-1) * (1 - 1e-4)).sum())
        assert (below == 0) == (least == share)


@pytest.mark.parametrize("kv_tokens", [1024, 128])
def test_likeliest_tokens_are_those_of_the_model(kv_tokens: int, path: Path, device: str) -> None:
    """Beside requests that tell none or others, as whole answers and in pieces."""
    engine = Engine.from_pretrained(path, device, kv_tokens=kv_tokens, page_size=4)
    engine.steps.depth = 1
    heats, counts = (0.7, 0.0, 1.3, 1.0), (3, 1, 0, 500)
    params = [
        SamplingParams(
            max_tokens=LENGTH, temperature=heat, n=2, seed=4, top_logprobs=count, top_p=0.9
        )
        for heat, count in zip(heats, counts, strict=True)
    ]
    whole = engine.generate(PROMPTS[:4], params)
    assert (engine.scheduler.preemptions > 0) == (kv_tokens < 1024)
    assert engine.generate(PROMPTS[:4], params, on_progress=lambda *_: None) == whole
    for prompt, heat, count, samples in zip(PROMPTS, heats, counts, whole, strict=False):
        for sample in samples:
            ids = torch.tensor([prompt + sample.token_ids])
            with torch.no_grad():
                logits = tiny(0)(ids).logits[0, len(prompt) - 1 : -1]
            best = torch.log_softmax(logits.float() / (heat or 1.0), -1).topk(min(count, 199))
            told = [[token for token, _ in scores] for scores in sample.top_logprobs]
            values = [value for scores in sample.top_logprobs for _, value in scores]
            assert told == best.indices.tolist() if count else sample.top_logprobs == []
            assert values == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("case", ["plain", "preempted", "tiers", "failing step"])
def test_prompts_are_scored_as_by_the_model(
    case: str, path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, beside others, of prompts that are cached, and with two samples each."""
    tiers = KVTiers(host_ratio=2.0, preemption="swap") if case == "tiers" else None
    sizes = {"kv_tokens": 96 if case in ("preempted", "tiers") else 1024, "max_prefill_tokens": 8}
    engine = Engine.from_pretrained(path, device, page_size=4, tiers=tiers, **sizes)
    engine.steps.depth = 1
    engine.generate(PROMPTS, GREEDY)
    if case == "failing step":
        forward, steps = engine.runner.forward, itertools.count()

        def failing(step: Any) -> Any:
            if next(steps) == 2:
                raise RuntimeError("the device failed")
            return forward(step)

        monkeypatch.setattr(engine.runner, "forward", failing)
    scored = SamplingParams(max_tokens=24, n=2, seed=3)
    params = [replace(scored, prompt_logprobs=count) for count in (0, 3, 500)]
    before = engine.scheduler.preemptions
    answers = engine.generate(PROMPTS, [*params, GREEDY, params[0]])
    assert (engine.scheduler.preemptions > before) == (case != "plain")
    for prompt, own, samples in zip(PROMPTS, [*params, GREEDY, params[0]], answers, strict=True):
        for sample in samples:
            if own is GREEDY:
                assert sample.prompt_logprobs is None
                continue
            with torch.no_grad():
                scores = torch.log_softmax(tiny(0)(torch.tensor([prompt])).logits[0].float(), -1)
            assert sample.prompt_logprobs is not None
            assert [row[0][0] for row in sample.prompt_logprobs] == prompt[1:]
            for place, row in enumerate(sample.prompt_logprobs):
                best = scores[place].topk(min(own.prompt_logprobs or 0, 199))
                assert [token for token, _ in row[1:]] == best.indices.tolist()
                wanted = [float(scores[place, prompt[place + 1]]), *best.values.tolist()]
                assert [value for _, value in row] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1 must be"),
        ({"top_logprobs": -1}, "top_logprobs=-1 must be"),
        ({"beam_width": 2, "temperature": 0, "top_logprobs": 2}, "beam_width=2 ranks by"),
        ({"min_p": 1.5}, r"min_p=1.5 must be in \[0, 1\]"),
        ({"min_tokens": 20}, "min_tokens=20 is more than max_tokens=16"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan must be a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be positive"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias=.* must be finite numbers by token id"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias=.* must be finite numbers by token id"),
        ({"logit_bias": 5}, "logit_bias=5 must be finite numbers by token id"),
        ({"allowed_token_ids": ()}, r"allowed_token_ids=\(\) allows no token"),
        ({"allowed_token_ids": "ab"}, "allowed_token_ids='ab' must be a sequence of token ids"),
        ({"bad_words": (5,)}, r"bad_words=\(5,\) must be sequences of token ids"),
        ({"bad_words": ((),)}, r"bad_words=\(\(\),\) must be sequences of token ids"),
        ({"beam_width": 2, "temperature": 0, "min_tokens": 2}, "beam_width=2 ranks by"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"logit_bias": {9999: 1.0}}, r"logit_bias of prompt 0 has token ids outside \[0, 199\)"),
        ({"bad_words": ((5, -1),)}, r"bad_words of prompt 0 has token ids outside \[0, 199\)"),
        ({"allowed_token_ids": (256,)}, r"allowed_token_ids of prompt 0 has token ids outside"),
        (
            {"allowed_token_ids": (5, 6), "bad_words": ((5,),), "min_tokens": 1}
            | {"stop_token_ids": (6,)},
            "min_tokens and bad_words exclude all of allowed_token_ids",
        ),
    ],
)
def test_parameters_that_no_token_meets_are_refused(
    path: Path, given: dict[str, Any], why: str
) -> None:
    engine = Engine.from_pretrained(path)
    with pytest.raises(ValueError, match=why):
        engine.generate([[5, 6]], SamplingParams(**given))
    assert not engine.unfinished


def test_penalties_go_on_through_interrupts(path: Path) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=1024)
    engine.steps.depth = 1
    params = case("all", PROMPTS[0])
    engine.submit(PROMPTS[0], params)
    outputs = []
    for step in range(3 * LENGTH):
        outputs += engine.step()
        if step in (3, 4, 9):
            engine.requeue()
    assert Completion.joined(outputs).token_ids == reference(tiny(0), PROMPTS[0], params)[0]
