"""Trainer and rollout as a pair for the cycle: both in this process, or as two Ray actors that share a device.

Each side has a saver of its own. The pair comes in state "train": the rollout asleep, the trainer awake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import memsaver
from rollout import Engine
from trainer_bridge.actor import RemoteRollout, RemoteTrainer, TrainerActor
from trainer_bridge.config import TrainerConfig
from trainer_bridge.trainer import Trainer

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_START_SECONDS = 60.0  # for Ray to find room for both actors
_NO_REPORTS = "RAY_USAGE_STATS_ENABLED"
_STORE_BYTES = 256 << 20  # of Ray's object store: batches and messages only, weights never pass through it


@contextlib.contextmanager
def open_inprocess(
    trainer: TrainerConfig, engine: Mapping[str, Any], *, alias: bool = False
) -> Iterator[tuple[Trainer, Engine]]:
    """Both sides in this process.

    engine: arguments of `Engine.from_pretrained`; path, device and dtype are the trainer's where not given. It loads no
    weights: the first sync brings them. alias: lay the trainer's parameters out as the engine's weights, for
    `Cycle(alias=True)`; a ValueError says why it cannot be.
    """
    arguments = _engine_arguments(trainer, engine)
    with contextlib.ExitStack() as undo:
        engine_saver = memsaver.MemorySaver(device=trainer.device)
        undo.callback(engine_saver.close)
        rollout = Engine.from_pretrained(**arguments, saver=engine_saver)
        rollout.sleep(level=2)
        saver = memsaver.MemorySaver(device=trainer.device)
        undo.callback(saver.close)
        side = Trainer(trainer, saver, layout=rollout.manifest if alias else None)
        undo.callback(side.close)
        side.connect([rollout])
        yield side, rollout


@contextlib.contextmanager
def open_ray(
    trainer: TrainerConfig,
    engine: Mapping[str, Any],
    *,
    timeout: float = 600.0,
    address: str | None = None,
    trainer_actor: type[TrainerActor] = TrainerActor,
    alias: bool = False,
) -> Iterator[tuple[RemoteTrainer, RemoteRollout]]:
    """Each side as an actor, half of one GPU each when the device is CUDA; Ray chooses the GPU.

    timeout: seconds for one call. address: of a running cluster ("auto": the one of this machine); None takes the one
    this process is connected to, the one of the Ray job it runs in (RAY_ADDRESS), or starts a small one of its own and
    ends it. alias: see `open_inprocess`.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rollout.actor import RolloutActor

    on_gpu = trainer.device != "cpu"
    arguments = _engine_arguments(trainer, engine)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_cluster(address))
        group = _reserve(on_gpu)
        undo.callback(ray.util.remove_placement_group, group)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        options = {"num_cpus": 1, "num_gpus": 0.5 if on_gpu else 0, "scheduling_strategy": strategy}
        actor: Any = RolloutActor  # ray's decorator hides its type
        handle: Any = actor.options(**options).remote(**_actor_arguments(arguments, on_gpu))
        undo.callback(ray.kill, handle)
        rollout = RemoteRollout(handle, "rollout", timeout)
        handle = ray.remote(trainer_actor).options(**options).remote(_trainer_in_actor(trainer, on_gpu))
        undo.callback(ray.kill, handle)
        side = RemoteTrainer(handle, "trainer", timeout)
        rollout.sleep(level=2)
        side.call("build", rollout.weight_layout().manifest if alias else None)
        side.connect(rollout)
        yield side, rollout


def _engine_arguments(trainer: TrainerConfig, engine: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {"path": trainer.model_path, "device": trainer.device, "dtype": trainer.torch_dtype, **engine}
    arguments["load_weights"] = False  # undefined until the first sync, which would replace them anyway
    if isinstance(arguments["dtype"], str):
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    if torch.device(arguments["device"]) != torch.device(trainer.device):
        raise ValueError(
            f"engine device {arguments['device']} and trainer device {trainer.device} differ; name one device"
        )
    return arguments


def _actor_arguments(arguments: Mapping[str, Any], on_gpu: bool) -> dict[str, Any]:
    """`Engine.from_pretrained`'s arguments as `RolloutActor` takes them: plain data, the rest under `engine`."""
    rest = dict(arguments)
    own: dict[str, Any] = {name: rest.pop(name) for name in ("path", "kv_tokens", "load_weights") if name in rest}
    own["dtype"] = str(rest.pop("dtype")).removeprefix("torch.")
    own["device"] = _device_in_actor(rest.pop("device"), on_gpu)
    return {**own, "threads": None if on_gpu else _cores(), "engine": rest}


def _trainer_in_actor(config: TrainerConfig, on_gpu: bool) -> TrainerConfig:
    threads = config.threads if on_gpu or config.threads is not None else _cores()
    return dataclasses.replace(config, device=_device_in_actor(config.device, on_gpu), threads=threads)


def _device_in_actor(device: str, on_gpu: bool) -> str:
    """Ray shows an actor one GPU, as number 0."""
    return "cuda:0" if on_gpu else device


def _cores() -> int:
    """For each side: they take turns. (Ray would give an actor as many threads as it has num_cpus.)"""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Connected to a Ray cluster inside; what was there before stays."""
    import ray

    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")  # Ray sets it in a job
    with _sigterm_kept():
        _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """ray.init puts a handler of its own in the place of the caller's."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread() and handler not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, handler)


def _connect(address: str | None) -> None:
    import ray

    if address is not None:  # the environment of its workers is the cluster's and the job's own
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        before = os.environ.get(_NO_REPORTS)
        os.environ[_NO_REPORTS] = "0"  # read by the processes that ray.init starts
        try:
            ray.init(
                address="local",
                num_cpus=max(2, _cores()),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_STORE_BYTES,
            )
        finally:
            _restore_environment(before)


def _restore_environment(before: str | None) -> None:
    if before is None:
        del os.environ[_NO_REPORTS]
    else:
        os.environ[_NO_REPORTS] = before


def _reserve(on_gpu: bool) -> PlacementGroup:
    """One bundle for both actors, so that they get the same GPU."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": 2, "GPU": 1} if on_gpu else {"CPU": 2}
    group = placement_group([bundle], strategy="STRICT_PACK")
    try:
        ray.get(group.ready(), timeout=_START_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        remove_placement_group(group)
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise ValueError(f"the Ray cluster has no room for {bundle} (free: {free}); end what runs there") from error
    return group
