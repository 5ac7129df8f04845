"""The native engine as a rollout of verl, in verl's own server manager and client, on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import Engine
from tests.helpers.models import greedy, save_tiny
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.rollout.package_names import Wheel
from tests.helpers.trainer_bridge.verl_cluster import ENGINE, Verl, verl_on_ray

WHEEL = Wheel("verl")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(WHEEL.may_skip, reason="verl is not installed"),
]
GREEDY = {"temperature": 0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
PROMPTS = [[5, 6, 7], [8], [9, 10] * 20, [11, 12, 13, 14]]
RayTaskError = pytest.importorskip("ray").exceptions.RayTaskError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("verl")
    save_tiny(folder / "model", "qwen2", tie_word_embeddings=True)
    return str(folder / "model")


@pytest.fixture(scope="module")
def verl(
    ray_cluster: RayCluster, path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Verl]:
    assert WHEEL.folder is not None
    with verl_on_ray(WHEEL.folder.parent, tmp_path_factory.mktemp("meet"), path, 1, 1) as started:
        yield started


@pytest.fixture
def synced(verl: Verl) -> Verl:
    """Put the engine to sleep, and hand it other weights, as a step of verl does."""
    verl.driver("sleep")
    verl.trainer("update", next(STEPS))
    return verl


STEPS = iter(range(1, 100))


def requests(**changes: Any) -> list[tuple[list[int], dict[str, Any]]]:
    return [(prompt, GREEDY | changes) for prompt in PROMPTS]


def trained(verl: Verl, path: str) -> Any:
    """Return transformers' model with the trainer's weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict(verl.trainer("state"), strict=False)
    return model


def test_two_settings_choose_the_engine_and_no_other_is_imported(verl: Verl) -> None:
    assert verl.driver("kinds") == ["EngineReplica"]


def test_weights_after_a_sync_are_the_trainers(synced: Verl, path: str, tmp_path: Path) -> None:
    trained(synced, path).save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, **ENGINE)
    assert synced.driver("engine", "digest") == [engine.digest()]


def test_concurrent_requests_get_the_greedy_tokens_of_the_trainers_model(
    synced: Verl, path: str
) -> None:
    model = trained(synced, path)
    together = synced.driver("generate", requests(logprobs=True))
    for request, output in zip(requests(), together, strict=True):
        (alone,) = synced.driver("generate", [request])
        assert output.token_ids == alone.token_ids == greedy(model, request[0], 8)
        assert (len(output.log_probs), alone.log_probs) == (len(alone.token_ids), None)
        logits = model(torch.tensor([request[0] + output.token_ids])).logits[0]
        wanted = logits.log_softmax(1)[len(request[0]) - 1 : -1]
        at = wanted.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), at, atol=1e-4, rtol=0)
        assert output.stop_reason == "completed"
        assert output.extra_fields["global_steps"] == output.extra_fields["max_global_steps"] > 0


def test_sampling_parameters_of_verl(synced: Verl) -> None:
    (plain,) = synced.driver("generate", requests(max_tokens=5, ignore_eos=True)[:1])
    assert len(plain.token_ids) == 5
    stop = plain.token_ids[2]
    (ended,) = synced.driver("generate", requests(stop_token_ids=[stop])[:1])
    assert ended.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    hot = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "max_tokens": 8, "ignore_eos": True}
    samples = synced.driver("generate", requests(**hot)[:1] * 6)
    assert len({tuple(sample.token_ids) for sample in samples}) > 1
    seeded = synced.driver("generate", requests(**hot, seed=3)[:1] * 2)
    assert seeded[0].token_ids == seeded[1].token_ids
    (other,) = synced.driver("generate", requests(allowed_token_ids=[7, 9], min_p=0.1)[:1])
    assert {*other.token_ids} <= {7, 9}
    for given, words in (
        ({"n": 2}, "sampling parameter n=2 has no effect"),
        ({"stop": ["end"]}, "sampling parameter stop=.* has no effect"),
        ({"min_p": 2.0}, "min_p=2.0 must be in"),
        ({"top_p": 2.0}, "top_p=2.0 must be in"),
    ):
        with pytest.raises(RayTaskError, match=words):
            synced.driver("generate", requests(**given)[:1])
    with pytest.raises(RayTaskError, match=r"a prompt of 128 tokens leaves no room within"):
        synced.driver("generate", [([5] * 128, GREEDY)])
    with pytest.raises(RayTaskError, match="has image data: rollout.name=memsaver takes text only"):
        synced.driver("generate", requests()[:1], image_data=["pixels"])


def test_abort_returns_what_was_generated_and_holds_later_requests(synced: Verl) -> None:
    long = GREEDY | {"max_tokens": 120, "ignore_eos": True}
    first, held, rejected = synced.driver("aborted", [5, 6, 7], long)
    assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])
    assert first.stop_reason == "aborted" and len(first.token_ids) < 120
    assert held.stop_reason == "completed" and len(held.token_ids) == 120
    assert held.token_ids[: len(first.token_ids)] == first.token_ids


def test_asleep_the_engine_holds_no_memory_and_refuses_requests(synced: Verl) -> None:
    synced.trainer("release")
    (report,) = synced.driver("engine", "report")
    assert report.committed_bytes == 0
    with pytest.raises(RayTaskError, match="cannot generate: paused: weights, kv_cache"):
        synced.driver("generate", requests())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "fp8"}, "rollout.quantization=fp8: rollout memsaver needs None"),
        ({"pipeline_model_parallel_size": 2}, "rollout.pipeline_model_parallel_size=2"),
        ({"data_parallel_size": 2}, "rollout.data_parallel_size=2: rollout memsaver needs 1"),
        ({"logprobs_mode": "raw_logprobs"}, "rollout.logprobs_mode=raw_logprobs"),
        ({"enable_rollout_routing_replay": True}, "rollout.enable_rollout_routing_replay=True"),
    ],
)
def test_unsupported_settings_are_named(
    verl: Verl, path: str, changes: dict[str, Any], words: str
) -> None:
    assert words in verl.trainer("refused", path, **changes)


def test_failed_syncs_let_the_server_refuse_requests_until_one_succeeds(
    synced: Verl, path: str
) -> None:
    step = next(STEPS)
    synced.driver("sleep")
    with pytest.raises(RayTaskError, match="tag weights is paused"):
        synced.trainer("sync", step)
    synced.trainer("resume", "weights")
    with pytest.raises(RayTaskError, match="version 0 is stale"):
        synced.trainer("sync", 0)
    synced.trainer("resume", "kv_cache")
    with pytest.raises(RayTaskError, match=r"last weight update .*\(None, .*not version 0"):
        synced.driver("generate", requests())
    with pytest.raises(RayTaskError, match="missing in the trainer"):
        synced.trainer("sync", step, module=False)
    synced.trainer("update", step)
    assert len(synced.driver("generate", requests())) == len(PROMPTS)
