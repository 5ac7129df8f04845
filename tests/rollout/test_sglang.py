"""Our rollout over a stand-in for SGLang, whose scheduler is a process of its own: hooks, calls,
sleeps, updates, answers, ends. With SGLang itself: test_hosted_gpu.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from memsaver.compat import require
from rollout import Completion, SamplingParams
from rollout.actor import build_engine
from rollout.hosted import SglangRollout
from rollout.hosted.sglang import completion, sglang_params
from rollout.hosted.sglang_process import SglangEngine
from rollout.tag_names import KV_CACHE, WEIGHTS
from tests.helpers.models import save_tiny
from trainer_bridge import Trainer, TrainerConfig

PLACE = Path(__file__).parents[1] / "helpers" / "rollout" / "stand_in_sglang"
ROOT = PLACE.parents[3]
GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(PLACE)
        patched.setenv("PYTHONPATH", f"{PLACE}:{ROOT}")
        patched.delenv("NCCL_GRAPH_REGISTER", raising=False)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "qwen3")
    return str(folder)


def options(path: str, **changes: Any) -> dict[str, Any]:
    there = {"model_path": path, "load_format": "dummy", "max_total_tokens": 512}
    return {**there, "context_length": 130, **changes}


@pytest.fixture(scope="module")
def rollout(path: str) -> Iterator[SglangRollout]:
    made = SglangRollout(SglangEngine(options(path)), path, loaded=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def trainer(rollout: SglangRollout, path: str) -> Iterator[Trainer]:
    assert "never loaded" in str(rollout.unavailable_reason())
    made = Trainer(TrainerConfig(model_path=path, device="cpu", random_init=True, threads=1))
    made.connect([rollout])
    yield made
    made.close()


def synced(rollout: SglangRollout, trainer: Trainer) -> int:
    rollout.wake_up()
    version = rollout.weights_version + 1
    assert trainer.sync_weights(version).digests == (rollout.digest(),)
    return version


def answers(rollout: SglangRollout, params: SamplingParams = GREEDY) -> list[list[Completion]]:
    return rollout.generate([[1, 2], [4], [5, 6, 7]], params)


def test_sleeps_and_updates(rollout: SglangRollout, trainer: Trainer) -> None:
    version = synced(rollout, trainer)
    assert rollout.served_version() == version
    first = answers(rollout)
    assert first[0][0].weight_versions == [version] * 4 and len({str(each) for each in first}) == 3
    rollout.sleep(1)
    assert rollout.report().committed_bytes == 0 and rollout.weights_version == version
    with pytest.raises(StateError, match="paused: weights, kv_cache"):
        answers(rollout)
    with pytest.raises(StateError, match="tag weights:discard is paused"):
        trainer.sync_weights(version + 1)
    rollout.wake_up([WEIGHTS])
    assert "paused: kv_cache" in str(rollout.unavailable_reason())
    rollout.wake_up([KV_CACHE])
    assert answers(rollout) == first
    rollout.sleep(2)
    rollout.wake_up()
    assert "sleep(level=2)" in str(rollout.unavailable_reason())
    version = synced(rollout, trainer)
    same = answers(rollout)
    assert [each[0].token_ids for each in same] == [each[0].token_ids for each in first]
    assert same[0][0].weight_versions == [version] * 4
    for shard in trainer.shards().values():
        shard.neg_()
    synced(rollout, trainer)
    assert answers(rollout)[0][0].token_ids != first[0][0].token_ids


def test_refusals(rollout: SglangRollout, trainer: Trainer) -> None:
    synced(rollout, trainer)
    with pytest.raises(ValueError, match="SGLang's weights have no second pages"):
        rollout.begin_update(99, shadow=True)
    with pytest.raises(StateError, match="alias=False"):
        rollout.alias_update(99, None, "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 tokens and max_tokens=127 exceed SGLang's 128"):
        answers(rollout, SamplingParams(max_tokens=127))
    for wrong, words in {
        SamplingParams(beam_width=2): "no beam search",
        SamplingParams(ignore_eos=True, stop_token_ids=(3,)): "would ignore stop_token_ids",
    }.items():
        with pytest.raises(ValueError, match=words):
            sglang_params(wrong, [])


def test_samples_and_progress(rollout: SglangRollout, trainer: Trainer) -> None:
    synced(rollout, trainer)
    seen: list[tuple[int, int, int]] = []
    each = [SamplingParams(max_tokens=3, n=n, ignore_eos=True) for n in (1, 2)]
    found = rollout.generate([[1], [2]], each, lambda *said: seen.append(said))
    assert [len(group) for group in found] == [1, 2] and seen[-1] == (3, 3, 9)
    stop = found[0][0].token_ids[1]
    cut = rollout.generate([[1]], SamplingParams(max_tokens=3, stop_token_ids=(stop,)))[0][0]
    assert cut.finish_reason == "stop" and cut.token_ids[-1] == stop


def test_one_sample_a_prompt_is_one_message(
    rollout: SglangRollout, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(rollout, trainer)
    sent = []
    engine = rollout.engine.engine

    def spied(**said: Any) -> Any:
        sent.append(said["input_ids"])
        return type(engine).async_generate(engine, **said)

    monkeypatch.setattr(engine, "async_generate", spied)
    prompts, each = (
        [[1], [2], [3]],
        [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 2)],
    )
    found = rollout.generate(prompts, each)
    assert [len(group[0].token_ids) for group in found] == [3, 1, 2]
    assert sent.count(prompts) == 1 and sent[0] == prompts


def test_an_interrupt_leaves_no_request(rollout: SglangRollout, trainer: Trainer) -> None:
    synced(rollout, trainer)

    def interrupt(done: int, total: int, count: int) -> None:
        raise KeyboardInterrupt

    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 120)]
    with pytest.raises(KeyboardInterrupt):
        rollout.generate([[1], [2]], each, interrupt)
    rollout.sleep(1)
    rollout.wake_up()
    assert answers(rollout)


def test_requests_with_seeds() -> None:
    params = SamplingParams(n=3, seed=7, top_k=5, top_p=0.9, temperature=0.5, max_tokens=2)
    (one,) = sglang_params(params, [2])
    assert one == {
        "n": 3, "max_new_tokens": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.9,
        "ignore_eos": False, "stop_token_ids": [2],
    }  # fmt: skip
    each = sglang_params(params, [2], seeded=True)
    assert len({said.pop("sampling_seed") for said in each}) == 3
    assert each == [{**one, "n": 1}] * 3
    assert sglang_params(SamplingParams(), [], seeded=True)[0]["top_k"] == -1


def test_a_request_that_was_refused() -> None:
    reason = {"type": "abort", "message": "too long"}
    with pytest.raises(ValueError, match="SGLang ended a request: too long"):
        completion({"output_ids": [], "meta_info": {"finish_reason": reason}}, 1)


def test_its_end_is_told_and_signals_are_ours_again(path: str) -> None:
    """What SGLang does with SIGTERM and SIGQUIT would end the trainer."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGQUIT)}
    engine = SglangEngine(options(path))
    assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGQUIT)  # as its scheduler does when it fails
    os.kill(engine.engine.get_all_child_pids()[0], signal.SIGKILL)
    with pytest.raises(StateError, match="SGLang's scheduler has ended"):
        engine.call("is_idle")
    with pytest.raises(StateError, match="SGLang's scheduler has ended"):
        engine.run([[1]], [{"max_new_tokens": 200, "n": 1}], lambda _: None)
    engine.close()
    assert {each: signal.getsignal(each) for each in before} == before


@pytest.mark.extended
def test_a_scheduler_that_does_not_start(path: str) -> None:
    with pytest.raises(RuntimeError, match="died during initialization"):
        SglangEngine(options(path, load_format="broken"))


def test_engines_by_name(path: str) -> None:
    with pytest.raises(ValueError, match="tp_size=2: one scheduler"):
        SglangEngine(options(path, tp_size=2))
    with pytest.raises(ValueError, match="device=cpu: SGLang needs a GPU"):
        build_engine("sglang", {"path": path, "device": "cpu"})


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    require("sglang")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.9")
    with pytest.raises(ValueError, match=r"sglang 0.5.9 is older than 0.5.16; run: pip install"):
        require("sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package sglang; run: pip install"):
        require("sglang")
