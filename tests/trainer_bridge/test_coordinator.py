"""What `open_ray` refuses and decides before any process is started."""

from __future__ import annotations

from typing import Any

import pytest

from rollout import SamplingParams
from tests.helpers.trainer_bridge.models import config
from trainer_bridge import open_ray
from trainer_bridge.actor import RemoteRollout
from trainer_bridge.coordinator import _actor_arguments
from trainer_bridge.remote import RemoteActor

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ({}, {"devices": 0}, "nodes=1 and devices=0 must be at least 1"),
        ({"tensor_parallel_size": 2}, {"devices": 3}, "tensor_parallel_size=2 does not divide devices=3"),
        ({"tensor_parallel_size": 2}, {"nodes": 2}, "an engine stays on one machine"),
        ({}, {"devices": 2, "alias": True}, r"alias=True is for one device, these are 2; sync by copies"),
    ],
)
def test_devices_that_do_not_fit(engine: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with open_ray(config("nowhere"), engine, **options):
            pass
    assert not ray.is_initialized()


def test_replicas_draw_different_seeds_and_ranks_of_one_engine_the_same() -> None:
    given = {"path": "x", "device": "cpu", "dtype": "torch.float32", "seed": 2**63 - 1, "kv_tokens": 64}
    made = [_actor_arguments(given, on_gpu=False, threads=1, replica=rank // 2) for rank in range(4)]
    assert [each["engine"]["seed"] for each in made] == [2**63 - 1, 2**63 - 1, 0, 0]
    assert all((each["kv_tokens"], each["dtype"], each["threads"]) == (64, "float32", 1) for each in made)


def test_nobody_adds_up_the_progress_of_replicas() -> None:
    replicas = RemoteRollout([RemoteActor(None, f"rollout[{rank}]") for rank in range(2)], 1.0)
    with pytest.raises(ValueError, match="on_progress is for one engine, these are 2 replicas"):
        replicas.generate([[1]], SamplingParams(), print)
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        replicas.generate([[1], [2]], [SamplingParams()])
