"""Requests that arrive while others run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from rollout import Arrival, Completion, Engine, SamplingParams, StreamingEngine
from tests.helpers.models import save_tiny
from tests.helpers.rollout.answers import random_prompts

SIZES: dict[str, Any] = {"kv_tokens": 512, "page_size": 16}
PROMPTS = random_prompts((3, 50, 20, 7))
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_tiny(tmp_path / "model", "qwen3")
    return str(tmp_path / "model")


def arrival(number: int, **changes: Any) -> Arrival:
    params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True} | changes
    return Arrival(key=str(number), prompt=PROMPTS[number], params=SamplingParams(**params))


def finish(engine: StreamingEngine) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while engine.scheduler.unfinished:
        ended |= engine.advance(steps=2)
    return ended


def tokens(result: list[Completion]) -> list[list[int]]:
    return [sample.token_ids for sample in result]


def test_requests_that_arrive_between_steps_get_the_same_tokens(path: str) -> None:
    alone = [
        [
            sample.token_ids
            for sample in Engine.from_pretrained(path, **SIZES).generate([p], GREEDY)[0]
        ]
        for p in PROMPTS
    ]
    engine = StreamingEngine.from_pretrained(path, **SIZES)
    ended: dict[str, Any] = {}
    for number in range(len(PROMPTS)):
        ended |= engine.advance([arrival(number)])
        assert engine.scheduler.unfinished
    ended |= finish(engine)
    assert [tokens(ended[str(number)]) for number in range(len(PROMPTS))] == alone
    engine.check_integrity()
    assert tokens(engine.generate(PROMPTS[:1], GREEDY)[0]) == alone[0]


def test_cancelled_and_impossible_requests_end_without_the_others(path: str) -> None:
    engine = StreamingEngine.from_pretrained(path, **SIZES)
    assert engine.advance([arrival(0), arrival(1)], steps=1) == {}
    ((key, error),) = engine.advance([arrival(2, max_tokens=600)]).items()
    assert key == "2" and "max_tokens 600" in str(error)
    ended = engine.advance(cancelled=["0", "unknown"], steps=3)
    (sample,) = ended.pop("0")
    assert (sample.finish_reason, len(sample.token_ids), ended) == ("abort", 1, {})
    (sample,) = finish(engine)["1"]
    assert (sample.finish_reason, len(sample.token_ids)) == ("length", 8)
    engine.check_integrity()


def test_a_key_is_refused_while_its_request_is_unfinished(path: str) -> None:
    engine = StreamingEngine.from_pretrained(path, **SIZES)
    engine.advance([arrival(0)], steps=2)
    with pytest.raises(ValueError, match="arrival '0' is the key of an unfinished request"):
        engine.advance([arrival(1), arrival(0)])
    with pytest.raises(ValueError, match="arrival '1' is the key of an unfinished request"):
        engine.advance([arrival(1), arrival(1, max_tokens=600)])
    assert list(finish(engine)) == ["0"]
    engine.check_integrity()
    assert list(engine.advance([arrival(0)], steps=9)) == ["0"]


def test_error_leaves_no_request_in_the_engine(path: str) -> None:
    engine = StreamingEngine.from_pretrained(path, **SIZES)
    engine.advance([arrival(0)])
    engine.sleep(unfinished="preempt")
    with pytest.raises(StateError, match="cannot generate: paused"):
        engine.advance([arrival(1)])
    assert not engine.scheduler.unfinished
    engine.wake_up()
    assert list(engine.advance([arrival(1)], steps=9)) == ["1"]
