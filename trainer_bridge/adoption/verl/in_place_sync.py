"""The trainer's side of a sync in verl: a rank writes its shards into the weights of an engine."""

import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from memsaver import StateError
from memsaver.system.plain import all_gather_plain
from rollout import channel
from rollout.protocols import UpdatableEngine
from trainer_bridge.adoption.verl.names import socket_name
from trainer_bridge.adoption.verl.ungathered_engine import TrainerWeights
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync, module_sync

_SECONDS = 60.0


class PeerCalls:
    """Calls to another process of this machine, one at a time, once the process has connected."""

    _channel: Connection | None = None
    _listener: channel.NamedSocket | None = None

    def __init__(self, pair: str, process: str) -> None:
        """Name the pair of processes; `process` names the other one in messages."""
        self.pair = pair
        self._process = process

    def listen(self, secret: str) -> None:
        """Open the pair's socket, unless it is open; the other process must know the secret."""
        if self._listener is None:
            self._listener = channel.listen(socket_name(self.pair, secret))

    @property
    def connected(self) -> bool:
        return self._channel is not None

    def accept(self) -> None:
        """Wait for the process, which has been told to connect.

        A StateError says that the process did not connect.
        """
        assert self._listener is not None
        try:
            self._channel = channel.accept(self._listener, _SECONDS)
        except TimeoutError as error:
            raise StateError(
                f"{self._process} did not connect within {_SECONDS:g} s; its log says why"
            ) from error

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call, whose result `answer` returns."""
        with self._ended_in(method):
            channel.send_call(self._open(), (method, args, kwargs))

    def answer(self, method: str, seconds: float | None = None) -> Any:
        """Wait for the result of a call, and return it or raise its error.

        After `seconds` without an answer, a TimeoutError is raised and the connection is closed.
        """
        with self._ended_in(method):
            if seconds is not None and not self._open().poll(seconds):
                raise TimeoutError(f"{method}: got no answer from {self._process} in {seconds} s")
            good, answer = channel.receive_answer(self._open())
        if not good:
            raise answer
        return answer

    @contextlib.contextmanager
    def _ended_in(self, method: str) -> Iterator[None]:
        """Close the connection after any error, since later answers would be of earlier calls."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) or not isinstance(error, (EOFError, OSError)):
                raise
            raise StateError(
                f"{method}: {self._process} has ended, and its weights with it; its log says why; "
                "start the run again"
            ) from error

    def _open(self) -> Connection:
        if self._channel is None:
            raise EOFError
        return self._channel

    def close(self) -> None:
        """Close the connection, which ends the calls; the process may connect again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class WorkerHandle(PeerCalls):
    """Handle on the weights of the engine's process on this rank's GPU, an `UpdatableEngine`.

    Attributes:
        waited: Seconds for which the last update waited for the process; None before it waited.
    """

    waited: float | None = None

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Let the worker, which has been told to connect, serve calls in the block.

        The first call waits for the worker. A StateError says that the worker did not connect.
        """
        self.waited = None
        try:
            yield
        finally:
            if self.waited is None:  # the worker will wait for calls until the connection closes
                with contextlib.suppress(StateError):
                    self.accept()
            self.close()

    def accept(self) -> None:
        started, self.waited = time.perf_counter(), 0.0  # so a failed wait is not repeated
        super().accept()
        self.waited = time.perf_counter() - started

    def __getattr__(self, name: str) -> Any:
        """Return a method of `UpdatableEngine`, which runs in the worker's process."""
        if name.startswith("_") or not hasattr(UpdatableEngine, name):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return functools.partial(self._call, name)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.waited is None:
            self.accept()
        self.send(method, *args, **kwargs)
        return self.answer(method)


class VerlSync:
    """The weight syncs of a rollout of verl, a mixin for the rollout's class.

    Attributes:
        server_handle: The server of this rank's replica, once it was looked up.
        receipt: Receipt of the last sync; None before the first.
        stages: Seconds of each part of the last sync, in order: "call" of the server, "wait" for
            the engine's process, the stages of the receipt, and "reply" of the server.
    """

    server_handle: Any
    # Looks the server up, and returns whether this rank of the replica is the one that calls it.
    _ensure_server_handle: Callable[[], bool]
    receipt: SyncReceipt | None = None
    stages: Mapping[str, float]
    _sync: WeightSync | None = None
    _handle: WorkerHandle
    _server: PeerCalls | None = None
    _secret: str | None = None  # of the job, agreed by the ranks of the trainer
    _version = 0

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Write the trainer's shards into the weights of this rank's worker, and verify them.

        A collective call of all ranks of the trainer. After an error, the server refuses requests.

        Args:
            weights: Weights of a `UngatheredEngine`.
            global_steps: Version of the weights; None: the last version again.
            **kwargs: Ignored: settings of adapters, which are refused.

        Raises:
            ValueError: The weights belong to another engine, or cannot be synced in place.
            StateError: The engine's worker or its server has ended.
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
        if self._secret is None:
            self._secret = all_gather_plain(secrets.token_hex())[0]
        self._handle.listen(self._secret)
        started = time.perf_counter()
        server = await self._connected_server() if self._ensure_server_handle() else None
        if server is not None:
            server.send("update_in_place", version)
        called = time.perf_counter()
        try:
            with self._handle.serving():
                receipt = self.receipt = self._connected(module).sync(version)
        except BaseException:
            if server is not None:  # the server refuses requests before the error is raised
                with contextlib.suppress(Exception):
                    server.answer("update_in_place", _SECONDS)
            raise
        synced = time.perf_counter()
        if server is not None:
            server.answer("update_in_place")
        self._version = version
        waited = self._handle.waited or 0.0
        self.stages = {"call": called - started, "wait": waited, **receipt.stages}
        self.stages["open"] = max(0.0, receipt.stages["open"] - waited)
        self.stages["reply"] = time.perf_counter() - synced

    async def _connected_server(self) -> PeerCalls:
        assert self._secret is not None
        if self._server is None:
            self._server = PeerCalls(f"{self._handle.pair}-server", "the engine's server")
        if not self._server.connected:
            self._server.listen(self._secret)
            await self.server_handle.connect_trainer.remote(self._server.pair, self._secret)
            self._server.accept()
        return self._server

    def _connected(self, module: nn.Module) -> WeightSync:
        if self._sync is None:
            handle: Any = self._handle
            self._sync = module_sync(module, [handle])
        return self._sync


def refused_settings(config: Any, model_config: Any) -> dict[str, tuple[Any, Any]]:
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
