"""Weight updates while requests run: what they compute with, and what no other request may use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memsaver import StateError
from rollout import Completion, Engine, KVTiers, SamplingParams
from tests.helpers.models import greedy
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.updates import TINY, greedy_over_old_keys, tiny, update

LENGTH = 10
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
SHORT, LONG = random_prompts((20, 70))


@pytest.fixture
def engine(saved: Saved) -> Engine:
    path, _ = saved("qwen3", **TINY)
    return Engine.from_pretrained(path, kv_tokens=1024, max_prefill_tokens=32)


def run_until(engine: Engine, id: int, tokens: int) -> list[int]:
    """Step until the request has this many tokens, or for 0 one chunk of its prompt."""
    told: list[int] = []
    if not tokens:
        engine.step()
    while len(told) < tokens:
        told += [token for output in engine.step() for token in output.token_ids]
    return told


def finish(engine: Engine, ids: list[int]) -> dict[int, list[Any]]:
    """Return the outputs of the requests until their ends."""
    outputs: dict[int, list[Any]] = {id: [] for id in ids}
    while engine.unfinished:
        for output in engine.step():
            outputs[output.id].append(output)
        engine.check_integrity()
    return outputs


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("how", ["recompute", "keep"])
@pytest.mark.parametrize(("prompt", "before"), [(SHORT, 1), (SHORT, 4), (LONG, 3), (LONG, 0)])
def test_running_request_goes_on_as_the_update_says(
    engine: Engine, how: str, shadow: bool, prompt: list[int], before: int
) -> None:
    id = engine.submit(prompt, PARAMS)
    first = run_until(engine, id, before)
    update(engine, 1, seed=1, shadow=shadow, in_flight=how)
    engine.check_integrity()
    last = Completion.joined(finish(engine, [id])[id])
    assert last.weight_versions == [1] * (LENGTH - before)
    if how == "recompute":
        assert last.token_ids == greedy(tiny(1), prompt + first, LENGTH - before)
    elif before:
        # The last token was drawn before the update, and its keys come from the new weights.
        seeds = [0] * before + [1] * (LENGTH - before)
        assert first + last.token_ids == greedy_over_old_keys(prompt, seeds)
    # Whoever asks the same now shares no keys of the old version.
    assert engine.generate([prompt], PARAMS)[0][0].token_ids == greedy(tiny(1), prompt, LENGTH)
    engine.check_integrity()


def test_siblings_and_later_turns_use_no_old_keys(engine: Engine) -> None:
    """A group that was prefilled before the update goes on; its prompt and turns are not cached."""
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, n=3)
    id = engine.submit(LONG, params)
    engine.step()  # a part of the prompt
    update(engine, 1, seed=1, in_flight="keep")
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for output in finish(engine, [id])[id]:
        answers[output.sample] += output.token_ids
    assert answers[0] == answers[1] == answers[2]
    turn = LONG + answers[0] + SHORT
    assert engine.generate([turn], PARAMS)[0][0].token_ids == greedy(tiny(1), turn, LENGTH)
    engine.check_integrity()


def test_preempted_request_leaves_no_old_keys_on_the_host(saved: Saved) -> None:
    """Of two requests that an update found running, one is preempted; nobody finds its pages."""
    path, _ = saved("qwen3", **TINY)
    sizes: dict[str, Any] = {"kv_tokens": 160, "max_running": 2, "tiers": KVTiers(host_ratio=4.0)}
    engine = Engine.from_pretrained(path, **sizes)
    prompts = random_prompts((60, 60), seed=3)
    long = replace(PARAMS, max_tokens=30)  # both need a sixth page, and there are ten
    ids = [engine.submit(prompt, long) for prompt in prompts]
    run_until(engine, ids[0], 2)
    update(engine, 1, seed=1, in_flight="keep")
    finish(engine, ids)
    assert engine.scheduler.preemptions == 1
    for prompt in prompts:
        assert engine.generate([prompt], PARAMS)[0][0].token_ids == greedy(tiny(1), prompt, LENGTH)
        engine.check_integrity()


def test_updates_refuse_running_requests_unless_told_otherwise(engine: Engine) -> None:
    id = engine.submit(SHORT, PARAMS)
    engine.step()
    with pytest.raises(StateError, match=r'begin a weight update while requests run: .* "keep"'):
        engine.begin_update(1)
    with pytest.raises(ValueError, match="in_flight='wait' must be one of refuse, recompute, keep"):
        engine.begin_update(1, in_flight="wait")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="commit a weight update while requests run"):
        update(engine, 1, seed=1, shadow=True)
    engine.abort_update("not now")
    assert engine.weights_version == 0
    outputs = finish(engine, [id])[id]
    assert {version for output in outputs for version in output.weight_versions} == {0}


def test_no_step_runs_between_begin_and_commit(engine: Engine) -> None:
    id = engine.submit(SHORT, PARAMS)
    run_until(engine, id, 2)
    engine.begin_update(1, in_flight="keep")
    with pytest.raises(StateError, match="the update to version 1 has not been committed"):
        engine.step()
    assert engine.unfinished == [id]
    update(engine, 2, seed=1, in_flight="keep")
    finish(engine, [id])


def test_checkpoint_loads_beside_running_requests(engine: Engine, saved: Saved) -> None:
    path, _ = saved("qwen3", **TINY)
    id = engine.submit(SHORT, PARAMS)
    first = run_until(engine, id, 3)
    with pytest.raises(StateError, match="load weights while requests run"):
        engine.load(path)
    engine.load(path, in_flight="recompute")
    rest = Completion.joined(finish(engine, [id])[id])
    assert first + rest.token_ids == greedy(tiny(0), SHORT, LENGTH)
