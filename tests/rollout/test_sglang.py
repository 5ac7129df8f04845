"""The SGLang rollout over a stand-in for SGLang with a scheduler process.

Tests with SGLang itself are in test_hosted_gpu.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
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
    fixed = {"model_path": path, "load_format": "dummy", "max_total_tokens": 512}
    return {**fixed, "context_length": 130, **changes}


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


def test_answers_survive_sleeps_and_change_with_updates(
    rollout: SglangRollout, trainer: Trainer
) -> None:
    version = synced(rollout, trainer)
    assert rollout.served_version() == version
    first = answers(rollout)
    assert first[0][0].weight_versions == [version] * 4 and len(set(map(str, first))) == 3
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
    assert [samples[0].token_ids for samples in same] == [samples[0].token_ids for samples in first]
    assert same[0][0].weight_versions == [version] * 4
    for shard in trainer.shards().values():
        shard.neg_()
    synced(rollout, trainer)
    assert answers(rollout)[0][0].token_ids != first[0][0].token_ids


def test_unsupported_requests_and_updates_are_refused(
    rollout: SglangRollout, trainer: Trainer
) -> None:
    synced(rollout, trainer)
    with pytest.raises(ValueError, match="SGLang's weights have no shadow pages"):
        rollout.begin_update(99, shadow=True)
    with pytest.raises(StateError, match="alias=False"):
        rollout.alias_update(99, None, "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 tokens and max_tokens=127 exceed SGLang's 128"):
        answers(rollout, SamplingParams(max_tokens=127))
    for wrong, words in {
        SamplingParams(beam_width=2): "beam_width=2: SGLang only samples",
        SamplingParams(adapter="a"): "adapter=.a.: SGLang serves merged",
        SamplingParams(ignore_eos=True, stop_token_ids=(3,)): "would ignore stop_token_ids",
    }.items():
        with pytest.raises(ValueError, match=words):
            sglang_params(wrong, [])


def test_generate_returns_all_samples_and_reports_progress(
    rollout: SglangRollout, trainer: Trainer
) -> None:
    synced(rollout, trainer)
    calls: list[tuple[int, int, int]] = []
    params = [SamplingParams(max_tokens=3, n=n, ignore_eos=True) for n in (1, 2)]
    groups = rollout.generate([[1], [2]], params, lambda *counts: calls.append(counts))
    assert [len(group) for group in groups] == [1, 2] and calls[-1] == (3, 3, 9)
    stop = groups[0][0].token_ids[1]
    cut = rollout.generate([[1]], SamplingParams(max_tokens=3, stop_token_ids=(stop,)))[0][0]
    assert cut.finish_reason == "stop" and cut.token_ids[-1] == stop


def test_prompts_with_one_sample_each_are_sent_in_one_message(
    rollout: SglangRollout, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(rollout, trainer)
    sent = []
    engine = rollout.engine.engine

    def spied(**arguments: Any) -> Any:
        sent.append(arguments["input_ids"])
        return type(engine).async_generate(engine, **arguments)

    monkeypatch.setattr(engine, "async_generate", spied)
    prompts = [[1], [2], [3]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 2)]
    groups = rollout.generate(prompts, params)
    assert [len(group[0].token_ids) for group in groups] == [3, 1, 2]
    assert sent.count(prompts) == 1 and sent[0] == prompts


def test_interrupt_leaves_no_request(rollout: SglangRollout, trainer: Trainer) -> None:
    synced(rollout, trainer)

    def interrupt(done: int, total: int, count: int) -> None:
        raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 120)]
    with pytest.raises(KeyboardInterrupt):
        rollout.generate([[1], [2]], params, interrupt)
    rollout.sleep(1)
    rollout.wake_up()
    assert answers(rollout)


def test_seeded_engine_gets_one_request_per_sample() -> None:
    params = SamplingParams(n=3, seed=7, top_k=5, top_p=0.9, temperature=0.5, max_tokens=2)
    (unseeded,) = sglang_params(params, [2])
    assert unseeded == {
        "n": 3, "max_new_tokens": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.9,
        "ignore_eos": False, "stop_token_ids": [2],
    }  # fmt: skip
    requests = sglang_params(params, [2], seeded=True)
    assert len({request.pop("sampling_seed") for request in requests}) == 3
    assert requests == [{**unseeded, "n": 1}] * 3
    assert sglang_params(SamplingParams(), [], seeded=True)[0]["top_k"] == -1


def test_completion_raises_when_sglang_refused_the_request() -> None:
    reason = {"type": "abort", "message": "too long"}
    with pytest.raises(ValueError, match="SGLang ended a request: too long"):
        completion({"output_ids": [], "meta_info": {"finish_reason": reason}}, 1)


def test_end_of_the_scheduler_raises_and_signal_handlers_are_restored(path: str) -> None:
    """Check that no handler of SGLang stays on SIGTERM or SIGQUIT: it would end the trainer."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    engine = SglangEngine(options(path))
    assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGQUIT)  # as SGLang's scheduler does when it fails
    os.kill(engine.engine.get_all_child_pids()[0], signal.SIGKILL)
    with pytest.raises(StateError, match="SGLang's scheduler has ended"):
        engine.call("is_idle")
    with pytest.raises(StateError, match="SGLang's scheduler has ended"):
        engine.run([[1]], [{"max_new_tokens": 200, "n": 1}], lambda _: None)
    engine.close()
    assert {number: signal.getsignal(number) for number in before} == before


def test_several_replicas_and_the_cpu_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="dp_size=2: only tensor parallelism .* tp_size"):
        SglangEngine(options(path, dp_size=2))
    with pytest.raises(ValueError, match="device=cpu: SGLang needs a GPU"):
        build_engine("sglang", {"path": path, "device": "cpu"})


@pytest.fixture
def two(path: str) -> Iterator[tuple[SglangRollout, Trainer]]:
    """Yield a rollout with two schedulers, and a trainer that is connected to it."""
    rollout = SglangRollout(SglangEngine(options(path, tp_size=2)), path, loaded=False)
    trainer = Trainer(TrainerConfig(model_path=path, device="cpu", random_init=True, threads=1))
    trainer.connect([rollout])
    yield rollout, trainer
    trainer.close()
    rollout.close()


def test_two_schedulers_get_their_shards_and_serve_one_version(
    two: tuple[SglangRollout, Trainer],
) -> None:
    """Compare the digest of each scheduler's weights with those of SGLang's own loader."""
    rollout, trainer = two
    assert "rank 0: weights undefined" in str(rollout.unavailable_reason())
    digests = trainer.sync_weights(1).digests
    assert rollout.served_version() == 1 and len(set(digests)) == 2
    assert digests == tuple(shard.digest() for shard in rollout.shards)
    first = answers(rollout)
    rollout.sleep(1)
    assert all(report.committed_bytes == 0 for report in rollout.engine.call_all("report"))
    rollout.wake_up()
    assert answers(rollout) == first
    tensors = [(name, shard.bfloat16()) for name, shard in trainer.shards().items()]
    rollout.engine.engine.update_weights_from_tensor(tensors)
    assert digests == tuple(shard.digest() for shard in rollout.shards)
    with pytest.raises(StateError, match="begin_update: each of the 2 schedulers .* `shards`"):
        rollout.begin_update(2)


def test_failed_verification_of_one_scheduler_commits_on_none(
    two: tuple[SglangRollout, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, trainer = two
    trainer.sync_weights(1)
    exchange = rollout.engine.exchange

    def corrupted(calls: list[Any]) -> list[Any]:
        if calls[1] is not None and calls[1][0] == "verify_update":
            calls = [None, ("verify_update", (replace(calls[1][1][0], digest=1),), {})]
        return exchange(calls)

    monkeypatch.setattr(rollout.engine, "exchange", corrupted)
    with pytest.raises(Exception, match="digest") as caught:
        trainer.sync_weights(2)
    assert "rank 1 of 2" in "".join(caught.value.__notes__)
    assert rollout.engine.call_all("served_version") == [None, None]
    assert "rank 0: weights undefined" in str(rollout.unavailable_reason())
    monkeypatch.undo()
    trainer.sync_weights(3)
    assert rollout.served_version() == 3 and answers(rollout)


def test_one_scheduler_that_refuses_a_sleep_or_ends_is_named(
    two: tuple[SglangRollout, Trainer],
) -> None:
    rollout, trainer = two
    trainer.sync_weights(1)
    rollout.engine.call_rank(1, "sleep", 1)
    assert "rank 1: paused: weights, kv_cache" in str(rollout.unavailable_reason())
    with pytest.raises(StateError, match="cannot generate: .*rank 1"):
        answers(rollout)
    rollout.wake_up()
    assert answers(rollout)
    with pytest.raises(ValueError, match="level") as caught:
        rollout.sleep(3)
    assert "rank 0 of 2" in "".join(caught.value.__notes__)
    os.kill(rollout.engine.engine.get_all_child_pids()[1], signal.SIGKILL)
    with pytest.raises(StateError, match="SGLang's scheduler has ended"):
        rollout.engine.call("is_idle")


def test_missing_and_old_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require("sglang")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.9")
    with pytest.raises(ValueError, match=r"sglang 0.5.9 is older than 0.5.16; run: pip install"):
        require("sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the Python package sglang; run: pip install"):
        require("sglang")
