"""Trainer and rollout as a pair for the cycle: both in this process, or as Ray actors, two on each
device.

Each side has a saver of its own. The pair comes in state "train": the rollout asleep, the trainer
awake.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import memsaver
from rollout.actor import RolloutActor, build_engine
from rollout.protocols import Rollout
from trainer_bridge.config import TrainerConfig
from trainer_bridge.remote.actor import RemoteRollout, RemoteTrainer, TrainerActor
from trainer_bridge.remote.group import Place, RemoteActor, connected, cores, reserved
from trainer_bridge.sync.shards import aligned_dims
from trainer_bridge.trainer import Trainer


@contextlib.contextmanager
def open_inprocess(
    trainer: TrainerConfig, engine: Mapping[str, Any], *, alias: bool = False
) -> Iterator[tuple[Trainer, Rollout]]:
    """Open both sides in this process.

    engine: arguments of `Engine.from_pretrained`; path, device and dtype are the trainer's where
    not given. With `kind`: of that engine's (`rollout.actor`). It loads no weights: the first
    sync brings them. alias: lay the trainer's parameters out as the engine's weights, for
    `Cycle(alias=True)`; a ValueError says why it cannot be.
    """
    arguments = _engine_arguments(trainer, engine)
    with contextlib.ExitStack() as undo:
        rollout, close = build_engine(arguments.pop("kind"), arguments)
        undo.callback(close)
        rollout.sleep(level=2)
        saver = memsaver.MemorySaver(device=trainer.device)
        undo.callback(saver.close)
        side = Trainer(trainer, saver, layout=rollout.weight_layout().manifest if alias else None)
        undo.callback(side.close)
        side.connect([rollout])
        _introduce(side, rollout)
        yield side, rollout


@contextlib.contextmanager
def open_ray(
    trainer: TrainerConfig,
    engine: Mapping[str, Any],
    *,
    devices: int = 1,
    nodes: int = 1,
    timeout: float = 600.0,
    address: str | None = None,
    trainer_actor: type[TrainerActor] = TrainerActor,
    alias: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Open a `RemoteTrainer` and a `RemoteRollout`, which have the methods of trainer and engine.

    Starts two actors on each of `devices` devices of each of `nodes` machines, half a GPU each
    when the device is CUDA: a trainer rank and an engine rank. Ray chooses the GPUs.

    engine: as of `open_inprocess`; so many devices of a machine as its tensor_parallel_size hold
    one engine together, and the engines are replicas of each other. timeout: seconds for one call.
    address: of a running cluster ("auto": the one of this machine); None takes the one this process
    is connected to, the one of the Ray job it runs in (RAY_ADDRESS), or starts a small one of its
    own and ends it. alias: see `open_inprocess`; one device. When the block ends, whatever
    happened, all actors are killed.
    """
    import ray

    on_gpu, size = trainer.device != "cpu", nodes * devices
    arguments = _engine_arguments(trainer, engine)
    engine_size = arguments.get("tensor_parallel_size", 1)
    _check_devices(nodes, devices, engine_size, alias)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connected(address, size))
        places = undo.enter_context(reserved(nodes, devices, on_gpu))
        threads = max(1, cores() // devices)
        args = [
            actor_arguments(arguments, on_gpu, threads, rank // engine_size) for rank in range(size)
        ]
        rollout = RemoteRollout(
            _start("rollout", ray.remote(RolloutActor), args, places, undo), timeout, engine_size
        )
        # Both sides take all threads by turns; Ray would give an actor its num_cpus.
        own = dataclasses.replace(
            trainer,
            device=_device_in_actor(trainer.device, on_gpu),
            threads=trainer.threads if on_gpu else trainer.threads or threads,
        )
        args = [{"config": own}] * size
        side = RemoteTrainer(
            _start("trainer", ray.remote(trainer_actor), args, places, undo), timeout
        )
        if trainer.leaving:  # beside the engine's start, which is in another process
            side.reserve()
        rollout.build()
        rollout.sleep(level=2)
        manifests = [layout.manifest for layout in rollout.call_all("weight_layout")]
        side.build(manifests[0] if alias else None, aligned_dims(manifests))
        side.connect(rollout)
        for mine, theirs in zip(side.each(), rollout.each(), strict=True):
            _introduce(mine, theirs)
        yield side, rollout


def _introduce(trainer: Any, rollout: Any) -> None:
    """Tell both sides of a device of each other, for memory to be handed over."""
    trainer.hand_over_to(rollout.as_peer())
    rollout.hand_over_to(trainer.as_peer())


def _start(
    name: str,
    actor: Any,
    args: Sequence[Mapping[str, Any]],
    places: Sequence[Place],
    undo: contextlib.ExitStack,
) -> list[RemoteActor]:
    """Start an actor at each place, killed when `undo` is. One alone has the plain name."""
    import ray

    ranks = []
    for rank, (place, mine) in enumerate(zip(places, args, strict=True)):
        handle = actor.options(**place).remote(**mine)
        undo.callback(ray.kill, handle)
        ranks.append(RemoteActor(handle, name if len(places) == 1 else f"{name}[{rank}]"))
    return ranks


def _check_devices(nodes: int, devices: int, engine_size: int, alias: bool) -> None:
    if min(nodes, devices) < 1:
        raise ValueError(f"nodes={nodes} and devices={devices} must be at least 1")
    if devices % engine_size:
        text = f"tensor_parallel_size={engine_size} does not divide devices={devices}"
        raise ValueError(f"{text}; an engine stays on one machine")
    if alias and nodes * devices > 1:
        text = f"alias=True is for one device, these are {nodes * devices}"
        raise ValueError(f"{text}; sync by copies (alias=False)")


def _engine_arguments(trainer: TrainerConfig, engine: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {
        "path": trainer.model_path,
        "device": trainer.device,
        "dtype": trainer.torch_dtype,
        "kind": "native",
        **engine,
    }
    # Undefined until the first sync, which would replace them anyway.
    arguments["load_weights"] = False
    if isinstance(arguments["dtype"], str):
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    if torch.device(arguments["device"]) != torch.device(trainer.device):
        text = f"engine device {arguments['device']} and trainer device {trainer.device} differ"
        raise ValueError(f"{text}; name one device")
    return arguments


def actor_arguments(
    arguments: Mapping[str, Any], on_gpu: bool, threads: int, replica: int
) -> dict[str, Any]:
    """Return `Engine.from_pretrained`'s arguments as `RolloutActor` takes them: plain data."""
    rest = dict(arguments)
    own: dict[str, Any] = {name: rest.pop(name) for name in ("path", "kind") if name in rest}
    own["device"] = _device_in_actor(rest.pop("device"), on_gpu)
    own["dtype"] = str(rest.pop("dtype")).removeprefix("torch.")
    if replica:  # requests without a seed are not to be answered alike everywhere
        rest["seed"] = (rest.get("seed", 0) + replica) % 2**63
    return {**own, "threads": None if on_gpu else threads, "engine": rest}


def _device_in_actor(device: str, on_gpu: bool) -> str:
    """Ray shows an actor one GPU, as number 0."""
    return "cuda:0" if on_gpu else device
