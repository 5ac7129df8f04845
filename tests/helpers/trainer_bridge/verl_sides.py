"""verl's own classes for trainer and vLLM server, with a stand-in for vLLM's engine."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
from collections.abc import Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc import locate
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from tests.helpers.peers import Peer, server
from tests.helpers.rollout.fused import FusedEngine
from tests.helpers.trainer_bridge.other_trainers import use_verl

server_prefix = operator.methodcaller("_get_server_name_prefix")
"""Return the prefix of the names of a replica's servers, or of those that a rollout looks for."""


class StandInWorker:
    """Stand-in for vLLM's `Worker`, into which vLLM injects an extension."""

    def __init__(self, path: str, local_rank: int, group: dist.ProcessGroup | None) -> None:
        config = AutoConfig.from_pretrained(path)
        self.fused = FusedEngine(config, "cpu", normed=False, biased=True, group=group)
        settings = SimpleNamespace(
            model_config=SimpleNamespace(model=path),
            parallel_config=None,
            speculative_config=None,
        )
        self.model_runner = SimpleNamespace(
            model=self.fused.model,
            vllm_config=settings,
            post_kv_cache_wake_up=self.fused.refill_kv_state,
        )
        self.local_rank = local_rank

    def get_model(self) -> nn.Module:
        return self.fused.model


class StandInEngine:
    """Stand-in for vLLM's `AsyncLLM` with one worker; it counts resets of the prefix cache."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._saver = worker, worker.fused.saver
        self.resets = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [await asyncio.to_thread(getattr(self._worker, method), *args)]

    async def reset_prefix_cache(self, reset_connector: bool) -> None:
        self.resets += 1

    async def reset_mm_cache(self) -> None:
        return

    reset_encoder_cache = reset_mm_cache

    async def sleep(self, level: int) -> None:
        assert level == 2
        self._saver.pause(*self._saver.tags, content="discard")

    async def wake_up(self, tags: Sequence[str]) -> None:
        self._saver.resume(*tags)


class EngineSide:
    """A server of the rollout, from verl's wheel, and one worker of its engine.

    `size` engines in a row share a model by tensor parallelism. Each has a server of its own.
    """

    def __init__(self, wheels: str, folder: str, path: str, size: int, rank: int) -> None:
        use_verl(Path(wheels), Path(folder) / f"engine-{rank}")
        replica = rank // size
        os.environ.update(
            VERL_REPLICA_RANK=str(replica), VERL_RAY_JOB_ID=f"job-{Path(folder).name}"
        )
        from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry
        from vllm import device_allocator
        from vllm.distributed import parallel_state

        from trainer_bridge.adoption.verl.replica import InPlaceReplica, InPlaceServer

        assert RolloutReplicaRegistry.get("memsaver_vllm") is InPlaceReplica
        made: Any = InPlaceReplica(replica, rollout_config(), None, gpus_per_node=1)
        assert made.server_class.__ray_metadata__.class_name == "InPlaceServer"
        assert server_prefix(made) == "memsaver_vllm_"
        self.server: Any = object.__new__(InPlaceServer)  # its __init__ needs a cluster
        kind = locate(operator.methodcaller("_get_worker_extension_cls")(self.server))
        assert not [key for key in vars(kind) if hasattr(StandInWorker, key) and key[:2] != "__"]
        self.worker = object.__new__(type("Worker", (StandInWorker, kind), {}))
        group = None
        if size > 1:
            store = dist.FileStore(f"{folder}/engines", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            parallel_state.share_engines(size)
            group = parallel_state.get_tp_group().cpu_group
        StandInWorker.__init__(self.worker, path, rank % size, group)
        device_allocator.instance = SimpleNamespace(saver=self.worker.fused.saver)
        self.engine = StandInEngine(self.worker)
        vars(self.server).update(
            node_rank=0,
            engine=self.engine,
            config=rollout_config(),
            model_config=SimpleNamespace(lora_rank=0, lora={}, mtp=None),
            rollout_mode=RolloutMode.HYBRID,
            global_steps=None,
        )
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self.sleep()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def sleep(self) -> None:
        self._run(self.server.sleep())

    def wake_up(self, tag: str) -> None:
        self._run(self.server.wake_up([tag]))

    def weights(self) -> dict[str, torch.Tensor]:
        return self.worker.fused.model.tensors()  # type: ignore[no-any-return]

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the weights as verl's own sync would leave them."""
        self.worker.fused.model.load_weights(tensors)
        return self.weights()

    def die_in(self, method: str) -> None:
        """Let this process end itself in the middle of the next update."""
        from trainer_bridge.adoption.verl.worker_extension import WorkerSide

        setattr(WorkerSide, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def state(self) -> tuple[int, int | None]:
        """Return how often the prefix cache was reset, and the number of the weights."""
        return self.engine.resets, self.server.global_steps

    def generate(self) -> Any:
        return self._run(self.server.generate([1], {}, "request"))

    def connect_trainer(self, pair: str, secret: str) -> None:
        self._run(self.server.connect_trainer(pair, secret))


def start_engine(*args: Any) -> tuple[Peer, Connection]:
    """Start a process with an `EngineSide`, and return the connection of an `EngineHandle`."""
    ours, theirs = server.Pipe()
    peer = Peer(_run_engine, theirs, *args)
    theirs.close()
    return peer, ours


def _run_engine(pipe: Connection, calls: Connection, *args: Any) -> None:
    side = EngineSide(*args)
    calls.send("ready")
    while True:
        method, arguments = calls.recv()
        try:
            calls.send((True, getattr(side, method)(*arguments)))
        except Exception as error:
            calls.send((False, f"{type(error).__name__}: {error}"))


class EngineHandle:
    """Handle on an `EngineSide` in another process."""

    def __init__(self, calls: Connection) -> None:
        self._calls = calls

    def call(self, method: str, *args: Any) -> Any:
        self._calls.send((method, args))
        good, answer = self._calls.recv()
        if not good:
            raise RuntimeError(answer)
        return answer

    def wait(self) -> None:
        """Wait until the engine has started."""
        assert self._calls.recv() == "ready"

    @property
    def connect_trainer(self) -> Any:
        return SimpleNamespace(remote=self._connect)

    async def _connect(self, pair: str, secret: str) -> None:
        await asyncio.to_thread(self.call, "connect_trainer", pair, secret)


def rollout_config(**changes: Any) -> Any:
    """Return what verl's class reads of `actor_rollout_ref.rollout`."""
    from verl.workers.config import RolloutConfig

    fixed = {"name": "memsaver_vllm", "tensor_model_parallel_size": 1}
    return RolloutConfig(**fixed | changes)


def model_config(path: str, **changes: Any) -> Any:
    hf = SimpleNamespace(model_type="qwen2", tie_word_embeddings=True)
    given = {"local_path": path, "lora_rank": 0, "lora": {}, "hf_config": hf}
    return SimpleNamespace(**given | changes)


def trainer_engine(module: nn.Module, config: Any) -> Any:
    """Return the engine that verl's registry chooses for FSDP2, around a module that is sharded."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    kind = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    engine = object.__new__(kind)  # its __init__ needs a GPU
    engine.module, engine.model_config = module, config
    engine.engine_config = SimpleNamespace(offload_policy=False)
    vars(engine).update(
        _is_offload_param=False, _uses_fsdp2_cpu_offload_policy=False, _qat_enabled=False
    )
    transformer_impl.get_device_id = lambda: "cpu"
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    return engine
