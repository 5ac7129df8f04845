"""verl's rollout on the trainer's side: it writes the trainer's shards into vLLM's weights."""

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from trainer_bridge.adoption.verl.in_place_sync import (
    VerlSync,
    WorkerHandle,
    check_supported,
    refused_settings,
)


class InPlaceRollout(VerlSync, ServerAdapter):
    """verl's client of its vLLM server, with weight syncs in place."""

    def __init__(self, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        """Name the pair of this rank and its vLLM worker.

        A ValueError names a setting of verl with which weights cannot be synced in place.
        """
        super().__init__(config, model_config, *args, **kwargs)
        settings = refused_settings(self.config, self.model_config)
        settings["rollout.enable_sleep_mode"] = (self.config.enable_sleep_mode, True)
        check_supported(settings, "in-place sync")
        self._handle = WorkerHandle(self.zmq_handle, "vLLM's worker")
