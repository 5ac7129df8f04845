"""The trainer's side of a sync in verl: a rank writes its shards into the weights of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from memsaver import StateError
from rollout.hosted import channel
from rollout.protocols import UpdatableEngine
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync, module_sync
from trainer_bridge.verl.names import socket_name
from trainer_bridge.verl.ungathered_engine import TrainerWeights

_SECONDS = 60.0


class WorkerHandle:
    """Handle on the weights of the engine's process on this rank's GPU, an `UpdatableEngine`."""

    _channel: Connection | None = None

    def __init__(self, pair: str, worker: str) -> None:
        """Open the socket of a pair of processes; `worker` names the engine's one in messages."""
        self._listener = channel.listen(socket_name(pair))
        self._worker = worker

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Wait for the worker, which has been told to connect, and serve calls in the block.

        A StateError says that the worker did not connect.
        """
        try:
            calls = channel.accept(self._listener, _SECONDS)
        except TimeoutError as error:
            raise StateError(
                f"{self._worker} did not connect within {_SECONDS:g} s; its log says why"
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
                f"{method}: {self._worker} has ended, and its weights with it; its log says why; "
                "start the run again"
            ) from error
        if not good:
            raise answer
        return answer


class VerlSync:
    """The weight syncs of a rollout of verl, a mixin for the rollout's class.

    Attributes:
        server_handle: The server of this rank's replica, once it was looked up.
        receipt: Receipt of the last sync; None before the first.
    """

    server_handle: Any
    # Looks the server up, and returns whether this rank of the replica is the one that calls it.
    _ensure_server_handle: Callable[[], bool]
    receipt: SyncReceipt | None = None
    _sync: WeightSync | None = None
    _handle: WorkerHandle
    _version = 0

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Write the trainer's shards into the weights of this rank's worker, and verify them.

        A collective call of all ranks of the trainer. After an error, the server refuses requests.

        Args:
            weights: Weights of a `UngatheredEngine`.
            global_steps: Number of the weights; None: the last number.
            **kwargs: Ignored: settings of adapters, which are refused.

        Raises:
            ValueError: The weights belong to another engine, or cannot be synced in place.
            StateError: The engine's worker has ended.
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
            if served:  # the server refuses requests before the error is raised
                await asyncio.wait(served, timeout=_SECONDS)
            raise
        await asyncio.gather(*served)
        self._version = version

    def _connected(self, module: nn.Module) -> WeightSync:
        if self._sync is None:
            handle: Any = self._handle
            self._sync = module_sync(module, [handle])
        return self._sync


def refused(config: Any, model_config: Any) -> dict[str, tuple[Any, Any]]:
    """Return (value, needed value) of the settings with which no sync in place is possible."""
    return {
        "model.lora_rank": (model_config.lora_rank or model_config.lora.get("rank", 0), 0),
        "rollout.quantization": (config.quantization, None),
        "rollout.pipeline_model_parallel_size": (config.pipeline_model_parallel_size, 1),
        "rollout.checkpoint_engine.backend": (config.checkpoint_engine.backend, "naive"),
    }


def check_supported(settings: Mapping[str, tuple[Any, Any]], who: str) -> None:
    """Raise a ValueError that names the first setting whose value is not the needed one.

    Args:
        settings: (value, needed value) by key below `actor_rollout_ref`.
        who: What needs these values.
    """
    for key, (value, needed) in settings.items():
        if value != needed:
            raise ValueError(
                f"actor_rollout_ref.{key}={value}: {who} needs {needed}; change it, or use "
                "rollout.name=vllm, which keeps verl's own sync"
            )
