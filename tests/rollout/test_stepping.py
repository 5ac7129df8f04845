"""Requests that come and go between steps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvcache import ReqHandle
from memsaver import StateError
from rollout import Completion, Engine, Output, SamplingParams
from rollout.scheduling.samples import Step
from tests.helpers.models import save_tiny
from tests.helpers.rollout.answers import random_prompts

SIZES: dict[str, Any] = {"kv_tokens": 512, "page_size": 16}
PROMPTS = random_prompts((3, 50, 20, 7))
FIELDS: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
GREEDY = SamplingParams(**FIELDS)
Parts = dict[tuple[int, int], list[Output]]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    save_tiny(tmp_path / "model", "qwen3")
    return Engine.from_pretrained(tmp_path / "model", **SIZES)


def finish(engine: Engine, parts: Parts | None = None) -> dict[tuple[int, int], Completion]:
    """Step until all requests have ended; return their samples by request and number."""
    parts = defaultdict(list) if parts is None else parts
    while engine.unfinished:
        for output in engine.step():
            parts[output.id, output.sample].append(output)
    engine.check_integrity()
    return {key: Completion.joined(outputs) for key, outputs in parts.items()}


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_arrive_between_steps_get_the_same_tokens(
    engine: Engine, stream: bool
) -> None:
    alone = [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    parts: Parts = defaultdict(list)
    ids = []
    for prompt in PROMPTS:
        ids.append(engine.submit(prompt, GREEDY, stream=stream))
        for output in engine.step():
            parts[output.id, output.sample].append(output)
    ended = finish(engine, parts)
    assert [[ended[id, 0]] for id in ids] == alone
    assert max(map(len, parts.values())) == (8 if stream else 1)
    assert engine.generate(PROMPTS[:1], GREEDY)[0] == alone[0]


@pytest.mark.parametrize("kind", [{"n": 3, "seed": 5}, {"beam_width": 3, "n": 2}])
def test_samples_of_a_request_are_told_once_each(engine: Engine, kind: dict[str, Any]) -> None:
    params = SamplingParams(**{**FIELDS, "temperature": 1.0, **kind})
    (expected,) = engine.generate([PROMPTS[1]], params)
    id = engine.submit(PROMPTS[1], params)
    ended = finish(engine)
    assert [ended[id, index] for index in range(params.n)] == expected
    assert len(ended) == params.n


def test_aborted_request_is_told_with_its_present_answer(engine: Engine) -> None:
    (whole,) = engine.generate([PROMPTS[0]], GREEDY)[0]
    first, second = (engine.submit(prompt, GREEDY, stream=False) for prompt in PROMPTS[:2])
    while not engine.scheduler.running or len(engine.scheduler.running[0].output) < 3:
        assert engine.step() == []
    engine.abort(first)
    (output,) = engine.step()
    assert (output.id, output.finish_reason) == (first, "abort")
    assert output.token_ids == whole.token_ids[: len(output.token_ids)] and output.token_ids
    with pytest.raises(ValueError, match=f"request {first} is unknown or has ended"):
        engine.abort(first)
    assert [*finish(engine)] == [(second, 0)]


def test_wrong_calls_are_refused_and_change_nothing(engine: Engine) -> None:
    id = engine.submit(PROMPTS[0], GREEDY)
    for wrong in ([], [10**6], "text"):
        with pytest.raises(ValueError, match="the prompt"):
            engine.submit(wrong, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the prompt needs .* lower max_tokens"):
        engine.submit(PROMPTS[0], SamplingParams(max_tokens=600))
    with pytest.raises(StateError, match=r"cannot generate: 1 requests of submit are unfinished"):
        engine.generate(PROMPTS, GREEDY)
    assert engine.unfinished == [id]
    assert len(finish(engine)) == 1 and engine.step() == []


def test_callback_that_steps_or_submits_is_refused(engine: Engine) -> None:
    calls: list[Any] = [lambda *_: engine.step(), lambda *_: engine.submit(PROMPTS[0], GREEDY)]
    for call in calls:
        with pytest.raises(StateError, match="from a callback of generate"):
            engine.generate(PROMPTS, GREEDY, on_progress=call)
        assert engine.unfinished == []
        engine.check_integrity()


def test_requests_wait_while_the_engine_sleeps(engine: Engine) -> None:
    alone = [engine.generate([prompt], GREEDY)[0][0] for prompt in PROMPTS[:2]]
    ids = [engine.submit(PROMPTS[0], GREEDY)]
    parts: Parts = defaultdict(list)
    for output in engine.step():
        parts[output.id, output.sample].append(output)
    engine.sleep(unfinished="recompute")
    ids.append(engine.submit(PROMPTS[1], GREEDY))
    with pytest.raises(StateError, match="cannot generate: paused"):
        engine.submit(PROMPTS[1], GREEDY, asleep="refuse")
    with pytest.raises(StateError, match="cannot generate: paused"):
        engine.step()
    engine.wake_up()
    ended = finish(engine, parts)
    assert [ended[id, 0] for id in ids] == alone


def test_sleep_that_aborts_tells_the_answers_so_far(engine: Engine) -> None:
    id = engine.submit(PROMPTS[0], GREEDY, stream=False)
    engine.step()
    engine.sleep(unfinished="abort")
    (output,) = engine.step()
    assert (output.id, output.finish_reason, len(output.token_ids)) == (id, "abort", 1)
    assert engine.unfinished == []


@pytest.mark.parametrize("kind", [{}, {"n": 3, "temperature": 1.0}, {"beam_width": 2}])
def test_failed_step_starts_over_and_the_second_in_a_row_ends_its_requests(
    engine: Engine, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**FIELDS | {"seed": 3} | kind)
    (expected,) = engine.generate([PROMPTS[1]], params)
    usual, calls = engine.runner.forward, itertools.count()

    def forward(step: Step) -> Any:
        if next(calls) in failing:
            raise RuntimeError("out of memory")
        return usual(step)

    monkeypatch.setattr(engine.runner, "forward", forward)
    failing = {0, 3, 5}  # never two in a row
    id = engine.submit(PROMPTS[1], params)
    ended = finish(engine)
    assert [ended[id, index] for index in range(params.n)] == expected
    calls, failing = itertools.count(), {2, 3}
    id, outputs = engine.submit(PROMPTS[1], params), []
    while engine.unfinished:
        outputs += engine.step()
    last = {output.sample: output for output in outputs}
    assert {"error"} <= {output.finish_reason for output in last.values()} <= {"error", "abort"}
    assert {str(output.error) for output in last.values() if output.error} == {"out of memory"}
    engine.check_integrity()
    calls = itertools.count()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([PROMPTS[1]], params)
    assert engine.unfinished == [] and engine.generate([PROMPTS[1]], params) == [expected]
    engine.check_integrity()


def test_siblings_that_were_not_forked_in_a_failed_step_are_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**FIELDS | {"n": 4, "seed": 3, "temperature": 1.0})
    (expected,) = engine.generate([PROMPTS[1]], params)
    usual, calls = engine.prefixes.fork, itertools.count()

    def fork(handle: ReqHandle) -> ReqHandle | None:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return usual(handle)

    monkeypatch.setattr(engine.prefixes, "fork", fork)
    id = engine.submit(PROMPTS[1], params)
    ended = finish(engine)
    assert [ended[id, index] for index in range(4)] == expected and next(calls) == 4


def test_requests_of_other_steps_survive_what_ends_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = engine.generate([PROMPTS[3]], GREEDY)
    usual = engine.runner.forward

    def forward(step: Step) -> Any:
        if any(sample.prompt == PROMPTS[0] for sample in step.samples):
            raise RuntimeError("an address is wrong")
        return usual(step)

    monkeypatch.setattr(engine.runner, "forward", forward)
    bad = engine.submit(PROMPTS[0], GREEDY)
    parts: Parts = defaultdict(list)
    for output in [*engine.step(), *engine.step()]:
        parts[output.id, output.sample].append(output)
    good = engine.submit(PROMPTS[3], GREEDY)
    ended = finish(engine, parts)
    assert ended[bad, 0].finish_reason == "error" and ended[good, 0] == alone[0]


def test_engine_that_tells_firsts_and_ends_keeps_what_is_new_until_it_is_asked(path: Path) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=256)
    long, short = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (20, 4))
    ids = engine.submit([5, 6], long), engine.submit([7], short)
    engine.ends_only = True
    told = [output for _ in range(8) for output in engine.step()]
    counts = [(output.id, len(output.token_ids)) for output in told]
    assert counts == [(ids[0], 1), (ids[1], 1), (ids[1], 3)]
    engine.ends_only = False
    (next_,) = engine.step()
    assert next_.id == ids[0] and len(next_.token_ids) == 8 and next_.finish_reason is None
    rest = [output for _ in range(11) for output in engine.step()]
    whole = Completion.joined([told[0], next_, *rest])
    assert [whole] == engine.generate([[5, 6]], long)[0]


def test_requeued_request_goes_on_before_those_that_wait(path: Path) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=256, max_running=1)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    ids = [engine.submit(prompt, params) for prompt in ([5, 6], [7])]
    told = [*engine.step(), *engine.step()]
    engine.requeue()
    assert not engine.scheduler.running
    while engine.unfinished:
        told += engine.step()
    assert [output.id for output in told] == sorted(output.id for output in told)
    for id, (wanted,) in zip(ids, engine.generate([[5, 6], [7]], params), strict=True):
        assert Completion.joined([output for output in told if output.id == id]) == wanted
