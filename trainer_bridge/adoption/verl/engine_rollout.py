"""verl's rollout on the trainer's side: it writes the trainer's shards into the native engine."""

import os
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from trainer_bridge.adoption.verl.in_place_sync import (
    VerlSync,
    WorkerHandle,
    check_supported,
    refused_settings,
)
from trainer_bridge.adoption.verl.names import ENGINE_ROLLOUT, engine_pair


def server_name(replica: int, suffix: str = "") -> str:
    """Return the name of the actor that serves a replica."""
    return f"{ENGINE_ROLLOUT}_server_{replica}_0{suffix}"


class EngineRollout(VerlSync, BaseRollout):
    """verl's client of its server of the native engine, with weight syncs in place."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        """Name the pair of this rank and its process of the engine.

        A ValueError names a setting of verl that the engine does not support.
        """
        super().__init__(config, model_config, device_mesh)
        check_supported(unsupported(self.config, self.model_config), f"rollout {ENGINE_ROLLOUT}")
        size, rank = self.config.tensor_model_parallel_size, int(os.environ["RANK"])
        self._replica = rank // size if replica_rank == -1 else replica_rank
        self._has_server = rank % size == 0
        self.server_handle = None
        pair = engine_pair(ray.get_runtime_context().get_job_id(), self._replica, rank % size)
        self._handle = WorkerHandle(pair, "the engine's process")

    def _ensure_server_handle(self) -> bool:
        if self._has_server and self.server_handle is None:
            self.server_handle = ray.get_actor(server_name(self._replica))
        return self._has_server

    async def resume(self, tags: list[str]) -> None:
        """Map the engine's memory of tags."""
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self.server_handle.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Release the engine's memory."""
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self.server_handle.sleep.remote()


def unsupported(config: Any, model_config: Any) -> dict[str, tuple[Any, Any]]:
    """Return (value, needed value) of the settings that the engine does not support."""
    mtp = config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout
    return refused_settings(config, model_config) | {
        "model.mtp.enable_rollout": (bool(mtp), False),
        "rollout.data_parallel_size": (config.data_parallel_size, 1),
        "rollout.enable_rollout_routing_replay": (config.enable_rollout_routing_replay, False),
        "rollout.logprobs_mode": (config.logprobs_mode, "processed_logprobs"),
        "rollout.prometheus.enable": (config.prometheus.enable, False),
        "rollout.scheduling_policy": (config.scheduling_policy, "fcfs"),
    }
