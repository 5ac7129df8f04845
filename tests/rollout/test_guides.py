"""Answers that follow a JSON schema: any answer is valid, whatever else happens to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout import Completion, Engine, EngineLoop, SamplingParams
from tests.helpers.models import save_tiny
from tests.helpers.recipes.models import save_byte_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["one", "two"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


def text_of(path: Path, answer: Completion) -> str:
    from transformers import AutoTokenizer

    text: str = AutoTokenizer.from_pretrained(path).decode(
        answer.token_ids, skip_special_tokens=True
    )
    return text


def check(path: Path, answer: Completion) -> bool:
    """Check that an answer follows the schema, and return whether it is whole."""
    text = text_of(path, answer)
    if answer.finish_reason == "length":
        assert text.startswith("{")
        return False
    found = json.loads(text)
    assert isinstance(found["n"], int) and found["kind"] in ("one", "two") and len(found) == 2
    return True


def test_answers_follow_their_schema_beside_others_and_through_preemption(path: Path) -> None:
    engine = Engine.from_pretrained(path, kv_tokens=448, page_size=4)
    engine.steps.depth = 1
    guided = SamplingParams(max_tokens=90, n=3, seed=1, json_schema=SCHEMA, top_logprobs=1)
    free = SamplingParams(max_tokens=90, n=3, seed=2, ignore_eos=True)
    prompts = [[70, 71], [80], [90, 91, 92]]
    first, other, second = engine.generate(prompts, [guided, free, guided])
    assert engine.scheduler.preemptions > 0
    whole = [check(path, answer) for answer in (*first, *second)]
    assert whole.count(True) > 3
    alone = Engine.from_pretrained(path, kv_tokens=2048)
    assert alone.generate(prompts, [guided, free, guided]) == [first, other, second]
    for answer in (*first, *second):  # the model's own probabilities, not the grammar's
        assert any(
            scores[0][1] > own
            for scores, own in zip(answer.top_logprobs, answer.logprobs, strict=True)
        )


def test_schemas_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(path)
    for schema, why in (("{oops", "Failed to parse JSON|JSON"), ({"type": 5}, "Type should be")):
        with pytest.raises(ValueError, match=f"json_schema: xgrammar refuses it: .*({why})"):
            engine.generate([[5]], SamplingParams(json_schema=schema))
    with pytest.raises(ValueError, match="json_schema=7 must be a JSON schema"):
        SamplingParams(json_schema=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decides which tokens come"):
        SamplingParams(json_schema=SCHEMA, ignore_eos=True)
    with pytest.raises(ValueError, match="beam_width=2 ranks by"):
        SamplingParams(json_schema=SCHEMA, beam_width=2, temperature=0)
    save_tiny(tmp_path, "qwen2")
    with pytest.raises(ValueError, match="json_schema: xgrammar refuses it"):
        Engine.from_pretrained(tmp_path).generate([[5]], SamplingParams(json_schema=SCHEMA))
    loop = EngineLoop(engine)
    try:
        with pytest.raises(ValueError, match="json_schema: xgrammar refuses it"):
            loop.submit([5], SamplingParams(json_schema="{oops")).result(60)
        (answer,) = loop.submit([5], SamplingParams(json_schema=SCHEMA, max_tokens=90)).result(60)
        check(path, answer)
    finally:
        loop.close()
