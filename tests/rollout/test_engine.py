"""Behavior that the engine adds to the model: seeded sampling, stop tokens, refusals, progress."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memsaver import MemorySaver
from rollout import Engine, SamplingParams
from tests.helpers.rollout.answers import ids, random_prompts


@pytest.fixture
def make(path: Path) -> Callable[..., Engine]:
    return lambda **fields: Engine.from_pretrained(path, **{"kv_tokens": 1024, **fields})


def test_seeded_answers_do_not_depend_on_the_batch(make: Callable[..., Engine]) -> None:
    prompts = random_prompts((5, 80, 33, 1))
    params = [
        SamplingParams(max_tokens=10, temperature=1.2, seed=seed, n=3) for seed in (1, 2, 3, 4)
    ]
    together = ids(make().generate(prompts, params))
    chunked = make(max_prefill_tokens=7, max_running=4)
    assert ids(chunked.generate(prompts, params)) == together
    assert ids(chunked.generate(prompts[::-1], params[::-1])) == together[::-1]
    for prompt, param, samples in zip(prompts, params, together, strict=True):
        assert ids(chunked.generate([prompt], param)) == [samples]
        assert len({tuple(sample) for sample in samples}) == 3  # samples of a prompt differ


def test_unseeded_calls_differ_and_equal_engines_agree(make: Callable[..., Engine]) -> None:
    prompts = random_prompts((5, 5))
    params = SamplingParams(max_tokens=12, temperature=2.0)
    first, second, other = make(), make(), make(seed=1)
    a, b = ids(first.generate(prompts, params)), ids(first.generate(prompts, params))
    assert a != b
    assert [ids(second.generate(prompts, params)), ids(second.generate(prompts, params))] == [a, b]
    assert ids(other.generate(prompts, params)) != a


def test_stop_token_ids_end_answers_and_ignore_eos_ignores_the_models_own(
    path: Path, tmp_path: Path, make: Callable[..., Engine]
) -> None:
    engine = make()
    prompts = random_prompts((9,))
    (free,) = ids(engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0)))[0]
    stop = free[5]
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))
    completion = engine.generate(prompts, params)[0][0]
    assert completion.token_ids == free[: free.index(stop) + 1]
    assert completion.finish_reason == "stop"
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": free[3]})
    )
    engine = Engine.from_pretrained(tmp_path / "model", kv_tokens=1024)
    first = engine.generate(prompts, params)[0][0]
    assert first.token_ids == free[: min(free.index(stop), free.index(free[3])) + 1]
    ignoring = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    assert engine.generate(prompts, ignoring)[0][0].token_ids == free


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], {}, "prompt 1 is empty"),
        ([199], {}, r"prompt 1 has token ids outside \[0, 199\)"),
        ([1], {"forced": [199]}, r"forced answer of prompt 1 has token ids outside \[0, 199\)"),
        ([-1], {}, "prompt 1 has token ids"),
        ([1.0], {}, "prompt 1 must be a sequence of token ids"),
        ([True], {}, "prompt 1 must be a sequence of token ids"),
        (["a"], {}, "prompt 1 must be a sequence of token ids"),
        ("ab", {}, "prompt 1 must be a sequence of token ids"),
        ([[1], [2, 3]], {}, "prompt 1 must be a sequence of token ids"),
        (1, {}, "prompt 1 must be a sequence of token ids .*pass a list of such sequences"),
        ([1] * 50, {"max_tokens": 80}, "prompt 1 needs .* KV tokens .*raise kv_tokens or lower"),
        ([1] * 50, {"max_tokens": 20}, "prompt 1 needs 70 positions .*max_context_len is 64"),
    ],
)
def test_generate_refuses_impossible_requests_and_starts_none(
    make: Callable[..., Engine], prompt: Any, params: dict[str, Any], match: str
) -> None:
    engine = make(kv_tokens=112, max_context_len=64)
    with pytest.raises(ValueError, match=match):
        engine.generate([[1, 2], prompt], [SamplingParams(max_tokens=4), SamplingParams(**params)])
    assert not engine.scheduler.unfinished
    with pytest.raises(ValueError, match="1 prompts but 2 SamplingParams"):
        engine.generate([[1]], [SamplingParams()] * 2)
    assert engine.generate([], SamplingParams()) == []


def test_engine_refuses_contradictory_sizes(make: Callable[..., Engine]) -> None:
    with pytest.raises(ValueError, match="max_context_len=4096 exceeds .*_embeddings=1024"):
        make(max_context_len=4096)
    with pytest.raises(ValueError, match="device=cuda:0 but the saver is on cpu"):
        make(device="cuda:0", saver=MemorySaver(device="cpu"))
    assert make(kv_tokens=64).max_context_len == 64 and make(kv_tokens=4096).max_context_len == 1024


def test_progress_counts_samples_and_tokens(make: Callable[..., Engine]) -> None:
    calls: list[tuple[int, int, int]] = []
    make(max_running=2).generate(
        random_prompts((4, 9, 30)),
        SamplingParams(max_tokens=5, n=2),
        on_progress=lambda *counts: calls.append(counts),
    )
    assert calls[-1] == (6, 6, 30) and calls == sorted(calls)
    assert all(total == 6 for _, total, _ in calls)


def test_stop_id_outside_of_the_vocabulary_is_named(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(kv_tokens=112)
    engine.generate([[1, 2]], SamplingParams(max_tokens=2, stop_token_ids=(3, 199, -1, 2**70)))
    assert f"outside [0, 199), which never end it: [199, -1, {2**70}]" in caplog.text
