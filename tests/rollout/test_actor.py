"""The engine in another process, driven through Ray."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import SamplingParams
from tests.helpers.models import build_tiny, greedy, save_tiny
from tests.rollout.test_lifecycle import GREEDY, PROMPTS, TINY, write
from tests.rollout.test_written_boxes import message

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from rollout.actor import RolloutActor

    path: Path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen3", **TINY)
    env = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
        create = RolloutActor.options(num_cpus=1).remote  # type: ignore[attr-defined]
        made = create(str(path), kv_tokens=512, threads=1, engine={"max_prefill_tokens": 16})
        ray.get(made.build.remote())
        yield made
        ray.shutdown()


def test_a_trainer_in_another_process_writes_the_weights(actor: Any) -> None:
    def call(method: str, *args: Any) -> Any:
        return ray.get(getattr(actor, method).remote(*args), timeout=120)

    assert call("pid") != os.getpid() and call("weights_version") == 0
    call("sleep", 2)
    assert call("report").committed_bytes == 0
    call("wake_up", ["weights"])
    assert call("verify_update", write(call("begin_update", 1), seed=1)).version == 1
    assert call("commit_update", 1).version == 1
    assert call("unavailable_reason") == "paused: kv_cache (call wake_up)"
    with pytest.raises(Exception, match="cannot generate: paused: kv_cache"):
        call("generate", PROMPTS, GREEDY)
    call("wake_up")
    model = build_tiny("qwen3", seed=1, **TINY)
    out = call("generate", PROMPTS, GREEDY)
    assert [samples[0].token_ids for samples in out] == [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert {event.op for event in call("drain_events")} >= {"grow", "pause", "resume"}
    offer = ray.get(actor.begin_update.remote(2, shadow=True, names=["model.norm.weight"]), timeout=120)
    assert offer.shadow and offer.names == ("model.norm.weight",)
    call("verify_update", write(offer, seed=2))
    assert call("unavailable_reason") is None and call("weights_version") == 1
    assert call("commit_update", 2).version == 2
    call("abort_update", "the trainer is gone")
    with pytest.raises(Exception, match="the trainer is gone"):
        call("generate", PROMPTS, SamplingParams())


def test_weights_come_as_messages(actor: Any) -> None:
    from trainer_bridge.actor import RemoteRollout
    from trainer_bridge.remote import RemoteActor

    rollout = RemoteRollout([RemoteActor(actor, "rollout")], 120.0)
    rollout.wake_up()
    version = rollout.weights_version + 1
    receipt = write(rollout.begin_update(version), seed=2)
    offer = rollout.begin_update(version)
    write(offer, seed=3)  # so that the pages hold something else
    boxes, data = message(offer, seed=2)
    buffer = data.new_zeros(data.numel() + 100)
    buffer[: data.numel()] = data
    rollout.write_update(boxes, buffer[: data.numel()])
    rollout.verify_update(receipt)
    rollout.commit_update(version)
    model = build_tiny("qwen3", seed=2, **TINY)
    out = rollout.generate(PROMPTS, GREEDY)
    assert [samples[0].token_ids for samples in out] == [greedy(model, prompt, 8) for prompt in PROMPTS]
