"""Beam search: answers against transformers, token by token, shared pages, and returned answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Completion, Engine, SamplingParams
from rollout.scheduling.beam import BeamSearch
from tests.helpers.case_selection import pairwise
from tests.helpers.models import MLA
from tests.helpers.rollout.answers import GAP, ids, random_prompts
from tests.helpers.rollout.answers import check as check_logprobs
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.tiers import PAGE

MAX_TOKENS = 10
LENGTHS = (1, 17, 40)


def make(path: Path, **fields: Any) -> Engine:
    return Engine.from_pretrained(
        path, **{"kv_tokens": 1024, "page_size": PAGE, "max_prefill_tokens": 24, **fields}
    )


def beams(width: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "beam_width": width, "n": width, **fields})


@torch.no_grad()
def reference(
    model: Any, prompt: list[int], params: SamplingParams
) -> tuple[list[list[int]], torch.Tensor]:
    """Return transformers' answers, best first and truncated after their end token, and scores."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(params.stop_token_ids) if params.stop_token_ids else None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = out.sequences[:, len(prompt) :].tolist()
    ends = params.stop_token_ids or ()
    lengths = [
        next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
        for answer in answers
    ]
    cut = [answer[:length] for answer, length in zip(answers, lengths, strict=True)]
    return cut, out.sequences_scores.cpu()


def check(model: Any, prompt: list[int], params: SamplingParams, got: list[Completion]) -> None:
    answers, scores = reference(model, prompt, params)
    assert ids([got]) == [answers] and len(got) == params.n
    mine = torch.tensor([beam.score for beam in got])
    torch.testing.assert_close(mine, scores.to(mine.dtype), atol=GAP, rtol=1e-6)
    check_logprobs(model, [prompt], [got], temperature=1.0)
    for beam in got:
        ended = beam.token_ids[-1] in (params.stop_token_ids or ())
        assert beam.finish_reason == ("stop" if ended else "length")
        assert beam.score == pytest.approx(
            sum(beam.logprobs) / len(beam.logprobs) ** params.length_penalty
        )


def generate(engine: Engine, prompts: list[list[int]], params: Any) -> list[list[Completion]]:
    """Generate, and check the engine's integrity after every step and at the end."""
    out = engine.generate(prompts, params, on_progress=lambda *_: engine.check_integrity())
    engine.check_integrity()
    assert not engine.scheduler.unfinished
    return out


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("deepseek_v2", MLA),
    ("mistral", {"sliding_window": 8, "head_dim": 16}),
    ("qwen3_next", {}),
]


@pytest.mark.parametrize(("kind", "overrides"), KINDS)
def test_beams_and_scores_equal_those_of_transformers(
    saved: Saved, kind: str, overrides: dict[str, Any], device: str
) -> None:
    # prompts of several lengths in one batch, the longest in chunks
    path, model = saved(kind, **overrides)
    engine, prompts = make(path, device=device), random_prompts(LENGTHS)
    params = [beams(4), beams(2), beams(4, n=1)]
    for prompt, param, got in zip(prompts, params, generate(engine, prompts, params), strict=True):
        check(model, prompt, param, got)


def some_stops(model: Any, prompts: list[list[int]]) -> tuple[int, ...]:
    """Return tokens from the middle of the answers to these prompts."""
    answers = [reference(model, prompt, beams(4))[0][i] for i, prompt in enumerate(prompts)]
    return tuple(sorted({answer[3 + i] for i, answer in enumerate(answers)}))


@pytest.fixture(scope="module")
def llama(saved: Saved) -> tuple[Path, Any, tuple[int, ...]]:
    """Return path and model, and tokens from the middle of its answers to `LENGTHS`."""
    path, model = saved("llama")
    return path, model, some_stops(model, random_prompts(LENGTHS))


CASES = pairwise([2, 4], [1.0, 0.0, 2.5, -1.0], [False, True, "never"], [1, 3])


@pytest.mark.parametrize(("width", "penalty", "early", "ends"), CASES)
def test_beams_equal_transformers_with_end_tokens_penalties_and_early_stopping(
    llama: tuple[Path, Any, tuple[int, ...]], width: int, penalty: float, early: Any, ends: int
) -> None:
    path, model, stops = llama
    engine, prompts = make(path), random_prompts(LENGTHS)
    rules = {"length_penalty": penalty, "early_stopping": early, "stop_token_ids": stops[:ends]}
    params = beams(width, max_tokens=14, **rules)
    out = generate(engine, prompts, params)
    for prompt, got in zip(prompts, out, strict=True):
        check(model, prompt, params, got)
    lengths = {len(beam.token_ids) for got in out for beam in got}
    # some answers end early, unless a large penalty prefers the longest
    assert penalty > 1 or ends == 1 or len(lengths) > 1


@pytest.mark.parametrize(
    ("kv_tokens", "longer", "cache"), [(1024, 0, True), (128, 16, True), (128, 16, False)]
)
def test_searches_and_other_requests_of_one_call_answer_as_alone(
    path: Path, kv_tokens: int, longer: int, cache: bool
) -> None:
    # The small pool preempts some requests, of a search all branches, and they start again.
    prompts = random_prompts((5, 33, 18, 40, 7))
    params = [beams(2), SamplingParams(max_tokens=12, temperature=0)]
    params += [beams(4, max_tokens=6, length_penalty=0.0)]
    params += [SamplingParams(max_tokens=8, temperature=1.3, seed=4, n=3), beams(3, n=2)]
    params = [replace(param, max_tokens=param.max_tokens + longer) for param in params]
    engine = make(path, kv_tokens=kv_tokens, prefix_cache=cache)
    together = ids(generate(engine, prompts, params))
    assert (engine.scheduler.preemptions > 0) == (kv_tokens < 1024)
    for prompt, param, got in zip(prompts, params, together, strict=True):
        assert ids(generate(make(path), [prompt], param)) == [got]


def test_search_restarts_after_sleep_and_returns_partial_beams_after_abort(path: Path) -> None:
    engine, (prompt,) = make(path), random_prompts((20,))
    before = ids(generate(engine, [prompt], beams(4)))

    lengths: list[int] = []

    def nap(*_: int) -> None:
        lengths.append(len(engine.scheduler.unfinished[0].output) if engine.unfinished else 0)
        if len(lengths) == 3:
            engine.sleep(unfinished="recompute")
            engine.wake_up()

    assert ids(engine.generate([prompt], beams(4), on_progress=nap)) == before
    assert lengths[:7] == [1, 2, 3, 1, 2, 3, 4]  # it started again

    def end(*_: int) -> None:
        if engine.unfinished and len(engine.scheduler.unfinished[0].output) == 3:
            engine.sleep(unfinished="abort")
            engine.wake_up()

    (got,) = engine.generate([prompt], beams(4, n=2), on_progress=end)
    assert [beam.finish_reason for beam in got] == ["abort"] * 2
    assert [len(beam.token_ids) for beam in got] == [3, 3]
    engine.check_integrity()


def test_prompt_is_computed_once_shared_by_all_branches_and_cached(path: Path) -> None:
    engine, (prompt,) = make(path), random_prompts((41,))
    used: list[int] = []
    for computed, hit in ((41, 0), (1, 40)):
        before = engine.stats
        engine.generate(
            [prompt], beams(4), on_progress=lambda *_: used.append(engine.blocks.available_pages)
        )
        after = engine.stats
        assert after.computed_tokens - before.computed_tokens == computed + 4 * (MAX_TOKENS - 1)
        assert after.prefix_hit_tokens - before.prefix_hit_tokens == hit
    # each branch has its own pages for 10 tokens
    assert engine.blocks.total_pages - min(used) <= 40 // PAGE + 4 * 3
    # dropped branches leave nothing in the cache
    assert engine.prefixes.cache.total_size == 40


def test_engine_refuses_search_that_can_never_fit(path: Path) -> None:
    engine = make(path, kv_tokens=96, max_running=8)
    with pytest.raises(ValueError, match="beam_width=9, but at most 8 samples of it run together"):
        engine.generate([[1]], beams(9, max_tokens=4))
    with pytest.raises(ValueError, match="prompt 1 has beam_width=4, but at most 3 samples"):
        engine.generate([[1], [1] * 25], beams(4, max_tokens=22))
    with pytest.raises(ValueError, match="70 end tokens, so it ranks 284 next tokens, of .* 199"):
        engine.generate([[1]], beams(4, max_tokens=4, stop_token_ids=tuple(range(70))))
    assert not engine.scheduler.unfinished
    (got,) = generate(engine, [[1] * 25], beams(3, max_tokens=22))  # the widest search that fits
    assert engine.scheduler.preemptions == 0 and len(got) == 3


def search(width: int, stop_ids: set[int] | None = None, **fields: object) -> BeamSearch:
    params = SamplingParams(
        **{"beam_width": width, "max_tokens": 9, "early_stopping": "never", **fields}
    )  # type: ignore[arg-type]
    return BeamSearch(params, stop_ids or set())


def test_surviving_branches_keep_their_rows_and_new_ones_take_free_rows() -> None:
    beams = search(4)
    beams.advance([[(i, -1.0 - i) for i in range(8)]] * 4, 0)
    assert [branch.tokens for branch in beams.branches] == [[0], [1], [2], [3]]
    worst = [(9, -50.0)] * 8
    two = [[(5, -0.1), (6, -0.2), *worst[2:]], [(7, -0.1), (8, -0.2), *worst[2:]]]
    assert beams.advance([worst, *two, worst], 1) == [(0, 1), (3, 2)]
    assert [branch.tokens for branch in beams.branches] == [[1, 6], [1, 5], [2, 7], [2, 8]]
    assert [branch.versions for branch in beams.branches] == [[0, 1]] * 4
    beams.restart()
    assert [branch.tokens for branch in beams.branches] == [[]] * 4
