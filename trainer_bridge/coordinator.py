"""Functions that open trainer and rollout as a pair, in this process or as Ray actors.

Each side has its own saver. A new pair is in state "train": the rollout asleep, the trainer awake.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import memsaver
from rollout.actor import build_engine
from rollout.process_group import Ports
from rollout.protocols import Rollout
from trainer_bridge.config import TrainerConfig
from trainer_bridge.remote.actor import (
    CALLS,
    RemoteRollout,
    RemoteTrainer,
    TrainerActor,
    introduce,
)
from trainer_bridge.remote.group import STORE_BYTES, Place, RemoteActor, connected, cores, reserved
from trainer_bridge.remote.placement import Placement
from trainer_bridge.remote.receiver import RolloutRankActor
from trainer_bridge.remote.replacement import OnReplaced, Replacer
from trainer_bridge.sync.shards import aligned_dims
from trainer_bridge.trainer import Trainer

Stage = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Returns a context manager for the named part of the opening, which runs in its block."""


@contextlib.contextmanager
def open_inprocess(
    trainer: TrainerConfig,
    engine: Mapping[str, Any],
    *,
    alias: bool = False,
    stage: Stage = contextlib.nullcontext,
) -> Iterator[tuple[Trainer, Rollout]]:
    """Open both sides in this process, and close them when the block ends.

    Args:
        trainer: Configuration of the trainer.
        engine: Arguments of `Engine.from_pretrained`, or of the engine that `kind` selects
            (`rollout.actor`). Path, device and dtype default to the trainer's. The engine loads no
            weights: the first sync writes them.
        alias: Lay out the trainer's parameters like the engine's weights, for `Cycle(alias=True)`.
        stage: Called for each part of the opening: "build_engine", "build_trainer" and, through
            Ray, "start_actors".

    Yields:
        Trainer and rollout.

    Raises:
        ValueError: The two sides name different devices, or `alias` is impossible for this pair;
            the text gives the reason.
    """
    arguments = _engine_arguments(trainer, engine)
    with contextlib.ExitStack() as undo:
        with stage("build_engine"):
            rollout, close = build_engine(arguments.pop("kind"), arguments)
            undo.callback(close)
            rollout.sleep(level=2)
        with stage("build_trainer"):
            saver = memsaver.MemorySaver(device=trainer.device)
            undo.callback(saver.close)
            layout = rollout.weight_layout().manifest if alias else None
            side = Trainer(trainer, saver, layout=layout)
            undo.callback(side.close)
            side.connect([rollout])
            introduce(side, rollout)
        yield side, rollout


@contextlib.contextmanager
def open_ray(
    trainer: TrainerConfig,
    engine: Mapping[str, Any],
    *,
    devices: int = 1,
    nodes: int = 1,
    rollout_devices: int = 0,
    rollout_nodes: int = 0,
    colocate: bool = True,
    timeout: float = 600.0,
    address: str | None = None,
    object_store_bytes: int = STORE_BYTES,
    ports: Ports | None = None,
    trainer_actor: type[TrainerActor] = TrainerActor,
    alias: bool = False,
    stage: Stage = contextlib.nullcontext,
    max_engine_restarts: int = 0,
    on_replaced: OnReplaced = lambda number, error: None,
) -> Iterator[tuple[Any, Any]]:
    """Open both sides as Ray actors, and kill the actors when the block ends.

    A rank is an actor. Two ranks that share a device have half a GPU each if the device is CUDA.
    Ray chooses the GPUs.

    Args:
        trainer: Configuration of every trainer rank.
        engine: As in `open_inprocess`. Each group of `tensor_parallel_size` devices of a machine
            forms one engine, and the engines are replicas of each other.
        devices: Devices per machine with a trainer rank.
        nodes: Machines with trainer ranks.
        rollout_devices: Further devices per machine, with an engine rank only. These engines never
            sleep, and each sync replaces their weights.
        rollout_nodes: Further machines, of as many devices, with an engine rank only.
        colocate: Whether devices with a trainer rank have an engine rank, too.
        timeout: Seconds that one call may take.
        address: Address of a running cluster; "auto" is this machine's cluster. None uses the
            cluster that this process is connected to or the cluster of its Ray job (RAY_ADDRESS).
            Without either it starts a small cluster, and ends it with the block.
        object_store_bytes: Size of the object store of a cluster that is started, and the least
            size on the nodes of a running cluster.
        ports: First and last port on which ranks of a group find each other; None: any free port.
        trainer_actor: Class of the trainer actors.
        alias: As in `open_inprocess`; for one device with both ranks.
        stage: As in `open_inprocess`.
        max_engine_restarts: How many engines that lose an actor are replaced (`Replacer`).
        on_replaced: Called with number and cause of each replacement before the new engine starts.

    Yields:
        A `RemoteTrainer` and a `RemoteRollout`, which have the methods of `Trainer` and `Engine`.

    Raises:
        ValueError: The arguments do not fit each other, or the cluster has no room or cannot be
            reached.
        ActorDied: An actor died while it started.
        ActorTimeout: An actor did not start within `timeout`.
    """
    import ray

    on_gpu = trainer.device != "cpu"
    arguments = _engine_arguments(trainer, engine)
    placement = Placement(
        nodes=nodes,
        devices=devices,
        rollout_devices=rollout_devices,
        rollout_nodes=rollout_nodes,
        colocate=colocate,
        engine_size=arguments.get("tensor_parallel_size", 1),
    )
    whole = placement.alone or (trainer.replicate and placement.engine_size == 1)
    whole = whole and len(placement.engines) == len(placement.trainers)
    if alias and not (whole and colocate):
        text = f"alias=True needs one device, with both ranks, not {placement.size}"
        raise ValueError(f"{text}; sync by copies (alias=False)")
    with contextlib.ExitStack() as undo:
        with stage("start_actors"):
            undo.enter_context(connected(address, placement.ranks, object_store_bytes))
            places = undo.enter_context(reserved(placement, on_gpu))
            start = partial(_start, undo=undo, places=places)
            several: dict[str, Any] = {"max_concurrency": CALLS}
            start_engines = partial(start, "rollout", ray.remote(**several)(RolloutRankActor))
            args = _engine_rank_arguments(arguments, placement, on_gpu)
            ranks = start_engines(args, placement.engines)
            rollout = RemoteRollout(
                ranks, timeout, placement.engine_size, sleeping=len(placement.shared)
            )
            configs = [{"config": _rank_config(trainer, devices)}] * len(placement.trainers)
            ranks = start("trainer", ray.remote(trainer_actor), configs, placement.trainers)
            side = RemoteTrainer(ranks, timeout)
            side.ports = rollout.ports = ports
        with stage("build_engine"):
            if trainer.leaving:  # overlaps with the start of the engine, which is another process
                side.reserve()
            rollout.build()
            rollout.sleep(level=2)
        with stage("build_trainer"):
            _build_trainer(side, rollout, placement, alias)

        def start_again(rank: int) -> Any:
            (new,) = start_engines([args[rank]], [placement.engines[rank]])
            return new.handle

        if max_engine_restarts:
            rollout.replacer = Replacer(
                trainer=side,
                rollout=rollout,
                placement=placement,
                start=start_again,
                left=max_engine_restarts,
                alias=alias,
                on_replaced=on_replaced,
            )
        yield side, rollout


def _engine_rank_arguments(
    arguments: Mapping[str, Any], placement: Placement, on_gpu: bool
) -> list[dict[str, Any]]:
    # Both sides use all threads in turn; Ray would limit an actor to its num_cpus.
    threads = max(1, cores() // -(-len(placement.engines) // placement.machines))
    return [
        actor_arguments(arguments, on_gpu, threads, rank // placement.engine_size)
        for rank in range(len(placement.engines))
    ]


def _rank_config(trainer: TrainerConfig, devices: int) -> TrainerConfig:
    """Return the configuration of each trainer rank, of which a machine has `devices`."""
    on_gpu, threads = trainer.device != "cpu", trainer.threads
    if not on_gpu:
        threads = threads or max(1, cores() // devices)
    device = _device_in_actor(trainer.device, on_gpu)
    return dataclasses.replace(trainer, device=device, threads=threads)


def _build_trainer(
    side: RemoteTrainer, rollout: RemoteRollout, placement: Placement, alias: bool
) -> None:
    """Build the trainer ranks, and connect them with the engines, which are built."""
    engines = rollout.each()
    shared = [engines[rank].weight_layout().manifest for rank in placement.shared]
    side.build(shared[0] if alias else None, aligned_dims(shared))
    side.connect(rollout, placement.owners())
    for trainer_rank, rank in zip(side.each(), placement.shared, strict=False):
        introduce(trainer_rank, engines[rank])


def _start(
    name: str,
    actor: Any,
    args: Sequence[Mapping[str, Any]],
    devices: Sequence[int],
    *,
    places: Sequence[Place],
    undo: contextlib.ExitStack,
) -> list[RemoteActor]:
    """Start an actor on each of `devices`, and register its kill with `undo`.

    Actors are named `name[device]`, or `name` if there is a single device.
    """
    import ray

    ranks = []
    for device, arguments in zip(devices, args, strict=True):
        place = places[device]
        handle = actor.options(**place.options).remote(**arguments)
        undo.callback(ray.kill, handle)
        label = name if len(places) == 1 else f"{name}[{device}]"
        ranks.append(RemoteActor(handle, label, place.node))
    return ranks


def _engine_arguments(trainer: TrainerConfig, engine: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {
        "path": trainer.model_path,
        "device": trainer.device,
        "dtype": trainer.torch_dtype,
        "kind": "native",
        **engine,
    }
    # The first sync writes all weights, so loading them would be wasted.
    arguments["load_weights"] = False
    if isinstance(arguments["dtype"], str):
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    if torch.device(arguments["device"]) != torch.device(trainer.device):
        text = f"engine device {arguments['device']} and trainer device {trainer.device} differ"
        raise ValueError(f"{text}; use one device for both")
    return arguments


def actor_arguments(
    arguments: Mapping[str, Any], on_gpu: bool, threads: int, replica: int
) -> dict[str, Any]:
    """Convert arguments of `Engine.from_pretrained` to plain arguments of `RolloutActor`.

    `threads` are torch threads on the CPU. `replica` is the engine's index among its replicas.
    """
    rest = dict(arguments)
    named: dict[str, Any] = {name: rest.pop(name) for name in ("path", "kind") if name in rest}
    named["device"] = _device_in_actor(rest.pop("device"), on_gpu)
    named["dtype"] = str(rest.pop("dtype")).removeprefix("torch.")
    if replica:  # replicas must not sample the same answers to requests without a seed
        rest["seed"] = (rest.get("seed", 0) + replica) % 2**63
    return {**named, "threads": None if on_gpu else threads, "engine": rest}


def _device_in_actor(device: str, on_gpu: bool) -> str:
    """Return the device as an actor sees it: Ray shows each actor one GPU, as number 0."""
    return "cuda:0" if on_gpu else device
