"""verl's rollout on the trainer's side: it writes the trainer's shards into vLLM's weights."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from torch import nn
from verl.workers.rollout.vllm_rollout import ServerAdapter

from memsaver import StateError
from rollout.hosted import channel
from rollout.protocols import UpdatableEngine
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync, module_sync
from trainer_bridge.verl.names import socket_name
from trainer_bridge.verl.ungathered_engine import TrainerWeights

_SECONDS = 60.0


class WorkerHandle:
    """Handle on the weights of the vLLM worker on this rank's GPU, an `UpdatableEngine`."""

    _channel: Connection | None = None

    def __init__(self, name: str) -> None:
        self._listener = channel.listen(name)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Wait for the worker, which has been told to connect, and serve calls in the block.

        A StateError says that the worker did not connect.
        """
        try:
            calls = channel.accept(self._listener, _SECONDS)
        except TimeoutError as error:
            raise StateError(
                f"vLLM's worker did not connect within {_SECONDS:g} s; its log says why"
            ) from error
        with calls:
            self._channel = calls
            try:
                yield
            finally:
                self._channel = None

    def __getattr__(self, name: str) -> Any:
        """Return a method of `UpdatableEngine`, which runs in the worker's process."""
        if name.startswith("_") or not hasattr(UpdatableEngine, name):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return functools.partial(self._call, name)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._channel is None:
                raise EOFError
            channel.send_call(self._channel, (method, args, kwargs))
            good, answer = channel.receive_answer(self._channel)
        except (EOFError, OSError) as error:
            raise StateError(
                f"{method}: vLLM's worker has ended, and its weights with it; its log says why; "
                "start the run again"
            ) from error
        if not good:
            raise answer
        return answer


class InPlaceRollout(ServerAdapter):
    """verl's client of its vLLM server, with weight syncs in place.

    Attributes:
        receipt: Receipt of the last sync; None before the first.
    """

    def __init__(self, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        """Open the socket at which this rank's vLLM worker will connect.

        A ValueError names a setting of verl with which weights cannot be synced in place.
        """
        super().__init__(config, model_config, *args, **kwargs)
        check_supported(self.config, self.model_config)
        self.receipt: SyncReceipt | None = None
        self._handle = WorkerHandle(socket_name(self.zmq_handle))
        self._sync: WeightSync | None = None
        self._version = 0

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Write the trainer's shards into the weights of this rank's worker, and verify them.

        A collective call of all ranks of the trainer. After an error, vLLM refuses requests.

        Args:
            weights: Weights of a `UngatheredEngine`.
            global_steps: Number of the weights; None: the last number.
            **kwargs: Ignored: settings of adapters, which are refused.

        Raises:
            ValueError: The weights belong to another engine, or cannot be synced in place.
            StateError: vLLM's worker has ended.
            SyncError: Another rank failed; the text names it.
        """
        if not isinstance(weights, TrainerWeights):
            raise ValueError(
                "in-place sync needs FSDP2 shards; set actor_rollout_ref.actor.strategy=fsdp2, "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive and "
                "VERL_ENGINE_VENDOR=memsaver, or use rollout.name=vllm"
            )
        module = weights.module()
        version = self._version if global_steps is None else global_steps
        served = []
        if self._ensure_server_handle():
            served = [asyncio.ensure_future(self.server_handle.update_in_place.remote(version))]
        try:
            with self._handle.connected():
                self.receipt = self._connected(module).sync(version)
        except BaseException:
            if served:  # vLLM refuses requests before the error is raised
                await asyncio.wait(served, timeout=_SECONDS)
            raise
        await asyncio.gather(*served)
        self._version = version

    def _connected(self, module: nn.Module) -> WeightSync:
        if self._sync is None:
            handle: Any = self._handle
            self._sync = module_sync(module, [handle])
        return self._sync


def check_supported(config: Any, model_config: Any) -> None:
    """Raise a ValueError that names a setting with which weights cannot be synced in place.

    Args:
        config: verl's `RolloutConfig`.
        model_config: verl's `HFModelConfig`.
    """
    lora_rank = model_config.lora_rank or model_config.lora.get("rank", 0)
    refused = {
        "model.lora_rank": (lora_rank, 0),
        "rollout.quantization": (config.quantization, None),
        "rollout.pipeline_model_parallel_size": (config.pipeline_model_parallel_size, 1),
        "rollout.checkpoint_engine.backend": (config.checkpoint_engine.backend, "naive"),
        "rollout.enable_sleep_mode": (config.enable_sleep_mode, True),
    }
    for key, (value, needed) in refused.items():
        if value != needed:
            raise ValueError(
                f"actor_rollout_ref.{key}={value}: in-place sync needs {needed}; change it, or use "
                "rollout.name=vllm, which keeps verl's own sync"
            )
