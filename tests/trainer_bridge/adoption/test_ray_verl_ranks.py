"""Two trainer ranks of verl that share a native engine of two ranks, on Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.models import greedy, save_tiny
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.rollout.package_names import Wheel
from tests.helpers.trainer_bridge.verl_cluster import verl_on_ray

WHEEL = Wheel("verl")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.skipif(WHEEL.may_skip, reason="verl is not installed"),
]
REQUESTS = [([5, 6, 7], {"temperature": 0}), ([8], {"temperature": 0})]
RayTaskError = pytest.importorskip("ray").exceptions.RayTaskError


def test_ranks_get_their_shards_and_a_killed_one_ends_the_engine(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    assert WHEEL.folder is not None
    path = str(tmp_path / "model")
    save_tiny(path, "qwen2", tie_word_embeddings=True)
    with verl_on_ray(WHEEL.folder.parent, tmp_path, path, 2, 2) as verl:
        verl.driver("sleep")
        verl.trainer("update", 1)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.load_state_dict(verl.trainer("state"), strict=False)
        outputs = verl.driver("generate", REQUESTS)
        for (prompt, _), output in zip(REQUESTS, outputs, strict=True):
            assert output.token_ids == greedy(model, prompt, 8)
        os.kill(verl.driver("engine", "pid")[1], signal.SIGKILL)
        with pytest.raises(RayTaskError, match="a process of the engine has ended"):
            verl.driver("generate", REQUESTS)
        with pytest.raises(RayTaskError, match="a process of the engine has ended"):
            verl.trainer("resume", "weights")
