"""A side that dies, and memory that is not there: clear errors, the other side unharmed, nothing left on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memsaver import OutOfMemory
from rollout import SamplingParams
from tests.helpers.faults import killing_trainer, wait_gone
from tests.helpers.memory import family_bytes
from tests.helpers.ray_cluster import RayCluster, until
from tests.helpers.trainer_bridge.models import config, make_batch
from trainer_bridge import ActorDied, Cycle, CycleError, open_inprocess, open_ray

ENGINE = {"kv_tokens": 256, "page_size": 16}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def nothing_stays(device: str) -> Iterator[None]:
    """Used memory of the device, or what this process and its actors hold, comes back to where it was."""
    family_bytes(device)  # makes this process's own context
    before = family_bytes(device) + (0 if device == "cpu" else 512 * 1024)
    yield
    until(lambda: family_bytes(device) <= before, lambda: f"{family_bytes(device) - before} bytes were left behind")


@pytest.mark.ray
def test_a_rollout_killed_when_half_is_written(
    device: str, model_path: str, nothing_stays: None, ray_cluster: RayCluster
) -> None:
    batch = make_batch(4)
    with open_ray(config(model_path, device=device), ENGINE, trainer_actor=killing_trainer()) as (trainer, rollout):
        pids = [trainer.call("pid"), rollout.call("pid")]
        scores = trainer.compute_log_prob(batch)
        trainer.call("kill_in_sync", pids[1])
        cycle = Cycle(trainer, rollout)
        with pytest.raises(CycleError, match="stage 'sync_weights' failed: .*the rollout actor died") as caught:
            cycle.to_rollout(1)
        assert isinstance(caught.value.cause, ActorDied)
        assert "the rollout could not be told" in caught.value.__notes__[-1]
        trainer.restore()
        assert trainer.compute_log_prob(batch) == scores, "the trainer lost something"
    wait_gone(pids)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_wake_up_without_room_changes_nothing_and_can_be_repeated(model_path: str) -> None:
    engine = {**ENGINE, "kv_tokens": 1 << 20}  # 512 MiB
    batch = make_batch(4)
    with open_inprocess(config(model_path, device="cuda:0"), engine) as (trainer, rollout):
        scores = trainer.compute_log_prob(batch)
        cycle = Cycle(trainer, rollout)
        trainer.empty_cache()
        hog = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda:0")
        with pytest.raises(CycleError, match=r"stage 'wake_kv_cache' failed: .*needs 5\d\d.* MiB") as caught:
            cycle.to_rollout(1)
        cause = caught.value.cause
        assert isinstance(cause, OutOfMemory)
        assert cause.holders["torch's tensors"] >= hog.nbytes and cause.requested_bytes >= 512 << 20
        tags = rollout.report().tags
        assert [tags[tag].state for tag in ("weights", "kv_cache", "cuda_graph")] == ["active", "paused", "paused"]
        del hog
        torch.cuda.empty_cache()
        rollout.wake_up()
        assert len(rollout.generate([[5, 6, 7]], GREEDY)[0][0].token_ids) == 8
        rollout.sleep(level=2)
        trainer.restore()
        assert trainer.compute_log_prob(batch) == scores
