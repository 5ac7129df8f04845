"""memsaver's sync between two Ray actors on one GPU, and over two GPUs with an engine on each."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import memsaver
from benchmarks.common import MIB, Figure, Figures, Times, figures, medians, rise_of
from benchmarks.sync.base import (
    RANKS,
    TARGET,
    Source,
    SyncScale,
    content,
    moves,
    ranks,
    synced,
    tp_dim,
)
from memsaver.ops.rows import dot
from memsaver.system.devices import place_of
from rollout import Engine
from trainer_bridge import LoraConfig, TrainerConfig, open_ray
from trainer_bridge.remote.actor import RemoteRollout, RemoteTrainer
from trainer_bridge.sync.agree import Agreement, group_agreement
from trainer_bridge.sync.shards import SourceShard, local_box
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync

# seconds, less than a training step; the driver clears the memory that a sleeping engine has freed
ASLEEP = 0.5
WARMUP = 3
ENGINE = {"dtype": "bfloat16", "kv_tokens": 1024, "cuda_graphs": False}
PHASES = ("open", "map", "write", "verify", "read back", "commit")


# ---------------------------------------------------------------- one GPU


def one_gpu(scale: SyncScale) -> Figures:
    measured = [figure for source in scale.sources for figure in _one_gpu(scale, source)]
    return measured + _by_pages(scale, scale.sources[0])


def _trainer(scale: SyncScale, source: Source, folder: str, **more: Any) -> TrainerConfig:
    return TrainerConfig(
        model_path=str(source.save(folder)),
        random_init=True,
        dtype=source.dtype,
        param_dtype="bfloat16",
        device=str(scale.device),
        **more,
    )


def _one_gpu(scale: SyncScale, source: Source) -> Figures:
    """Measure the write alone, and the whole sync: map, write, unmap, read back, compare."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_ray(_trainer(scale, source, folder), ENGINE) as (trainer, rollout),
    ):
        risen = [_rise(scale, trainer, rollout, version) for version in range(WARMUP)]
        rows = [
            _over_actors(trainer, rollout, version)
            for version in range(WARMUP, scale.repeats + WARMUP)
        ]
    middle = medians(rows)
    assert middle["nbytes"] == source.params * TARGET.itemsize
    parts = {key: middle[key] for key in (*PHASES, "call")}
    whole = f"{source}: memsaver, whole sync over Ray actors"
    return [
        *synced(scale, f"{source}: memsaver, cast, copy and digest", middle["copy"], source.copied),
        *synced(scale, whole, middle["sync"], source.copied, rise=max(risen[1:]), parts=parts),
        Figure(what=f"{whole}, the first one", value=risen[0] / MIB, unit="MiB of the device more"),
    ]


def _by_pages(scale: SyncScale, source: Source) -> Figures:
    """Measure an engine that serves the trainer's own pages; at first both sides read them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_ray(_trainer(scale, source, folder), ENGINE, alias=True) as (trainer, rollout),
    ):
        receipts = []
        for version in range(scale.repeats + WARMUP):
            receipts.append(trainer.alias_weights(version))
            rollout.sleep(level=2)
    first, *_ = receipts
    steady = statistics.median(receipt.seconds for receipt in receipts[WARMUP:]) * 1e3
    name = f"{source}: memsaver, the trainer's own pages"
    return figures({f"{name}, first time, digests read": first.seconds * 1e3, name: steady})


def offloaded(scale: SyncScale) -> Figures:
    """Measure the reload of an offloaded trainer and a sync of all its weights.

    The model is frozen under adapters, because a GPU has room for two copies of it only.
    """
    source, times = scale.sources[0], Times(scale.repeats)
    lora = LoraConfig(rank=8, alpha=8.0, target_modules=("q_proj",))
    frozen: dict[str, Any] = {"lora": lora, "leaving": ("params",)}
    with (
        tempfile.TemporaryDirectory() as folder,
        open_ray(_trainer(scale, source, folder, **frozen), ENGINE) as (trainer, rollout),
    ):
        for version in times.rounds:
            trainer.offload()
            rollout.sleep(level=2)
            times("reloaded", trainer.reload)
            times("woken", partial(rollout.wake_up, ["weights"]))
            times("synced", partial(trainer.sync_weights, version))
    name = f"{source}: memsaver, from an offloaded trainer"
    whole = {name: sum(times.medians.values())}
    return figures(whole) + figures(times.medians, "ms of it", f"{name}: ")


def _over_actors(trainer: RemoteTrainer, rollout: RemoteRollout, version: int) -> dict[str, float]:
    time.sleep(ASLEEP)
    rollout.wake_up(["weights"])
    started = time.perf_counter()
    receipt = trainer.sync_weights(version)
    call = time.perf_counter() - started
    rollout.sleep(level=2)
    return {**_row(receipt), "call": call * 1e3}


def _rise(scale: SyncScale, trainer: RemoteTrainer, rollout: RemoteRollout, version: int) -> int:
    """Return the rise of the device's used bytes in a sync, by all processes.

    This is separate from the times, because sampling slows mapping down.
    """
    time.sleep(ASLEEP)
    rollout.wake_up(["weights"])
    rise = rise_of(scale.device, lambda: trainer.sync_weights(version))
    rollout.sleep(level=2)
    return rise


def _row(receipt: SyncReceipt) -> dict[str, float]:
    """Return the milliseconds and bytes of a sync."""
    stages = {stage: seconds * 1e3 for stage, seconds in receipt.stages.items()}
    return {
        **stages,
        "copy": receipt.copy_seconds * 1e3,
        "read back": receipt.verify_seconds * 1e3,
        "sync": receipt.seconds * 1e3,
        "nbytes": float(receipt.nbytes),
        "linked": float(receipt.link_bytes),
    }


# ---------------------------------------------------------------- two GPUs


class Case(NamedTuple):
    """The engines that shards of two ranks are written to.

    Attributes:
        name: Name of the case.
        source: The trainer's parameters.
        needs: "replica", "tp" or "ep", as in `moves`.
        aligned: Whether the shards are along the engine's slices.
    """

    name: str
    source: Source
    needs: str
    aligned: bool


def two_gpus(scale: SyncScale) -> Figures:
    """Measure FSDP2 shards of two ranks into two replicas, and into two tensor-parallel ranks."""
    first = scale.sources[0]
    cases = [Case("2 replicas", source, "replica", False) for source in scale.sources]
    ways = [("tp", False), ("tp", True)]
    if first.experts:  # gate and up are split separately, so halves of their tensor do not align
        ways = [("tp", False), ("ep", False), ("ep", True)]
    cases += [
        Case(f"{needs.upper()} 2, {'' if aligned else 'not '}aligned", first, needs, aligned)
        for needs, aligned in ways
    ]
    by_rank: list[list[list[dict[str, float]]]] = ranks(scale, _all_cases, cases)
    return [
        figure
        for case, *rounds in zip(cases, *by_rank, strict=True)
        for figure in _figures(scale, case, rounds)
    ]


def _figures(
    scale: SyncScale, case: Case, by_rank: Sequence[Sequence[Mapping[str, float]]]
) -> Figures:
    """Return the figures of a case, in which a round takes as long as its slowest rank.

    The bytes over the link must be those of the plan, which is the minimum.
    """
    name, source = f"{case.source}: {case.name}: memsaver", case.source
    local, linked = moves(source.shapes, case.needs, case.aligned)
    rows = [
        {key: max(row[key] for row in both) for key in both[0]}
        for both in zip(*by_rank, strict=True)
    ]
    middle = medians(rows)
    assert middle["linked"] <= RANKS * linked * TARGET.itemsize, "too many bytes went over the link"
    floor = local * (source.torch_dtype.itemsize + TARGET.itemsize), linked * TARGET.itemsize
    parts = {key: middle[key] for key in PHASES}
    return [
        *synced(scale, f"{name}, cast, copy and digest", middle["copy"], *floor),
        *synced(
            scale,
            f"{name}, whole sync",
            middle["sync"],
            *floor,
            rise=int(rows[0]["rise"]),
            parts=parts,
        ),
    ]


def _all_cases(rank: int, scale: SyncScale, cases: Sequence[Case]) -> list[list[dict[str, float]]]:
    """Return the rounds of all cases, run in one process because joining NCCL takes seconds."""
    ranks = group_agreement(dist.group.WORLD)
    return [_two_gpus(rank, scale, case, ranks) for case in cases]


def _two_gpus(rank: int, scale: SyncScale, case: Case, ranks: Agreement) -> list[dict[str, float]]:
    device = scale.place(rank)
    shards, tensors = _shards(rank, case, device)
    saver = memsaver.MemorySaver(device=device)
    engine = _engine(scale, case, saver)
    sync = WeightSync(shards, lambda: tensors, [engine], ranks, place=place_of(device))
    # separate from the times, because sampling slows mapping down
    rise = rise_of(device, lambda: [sync.sync(version) for version in range(WARMUP)])
    rows = []
    for version in range(WARMUP, scale.repeats + WARMUP):
        dist.barrier()
        rows.append({**_row(sync.sync(version)), "rise": float(rise)})
    _check(engine, case)
    saver.close()
    return rows


def _shards(
    rank: int, case: Case, device: torch.device
) -> tuple[list[SourceShard], dict[str, torch.Tensor]]:
    tensors, shards, source = {}, [], case.source
    for name, shape in source.shapes.items():
        dim = (tp_dim(name, case.needs) or 0) if case.aligned else 0
        start, size = local_box(shape, [Shard(dim)], (RANKS,), (rank,))
        mine = SourceShard(name=name, global_shape=shape, start=start, shape=size, rank=rank)
        box = _slices(mine.start, mine.shape)
        tensors[name] = (
            content(name, shape, device)[box].to(source.torch_dtype, copy=True).contiguous()
        )
        shards.append(mine)
    return shards, tensors


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(start, shape, strict=True))


def _engine(scale: SyncScale, case: Case, saver: memsaver.MemorySaver) -> Engine:
    split: dict[str, Any] = {}
    if case.needs != "replica":
        split = {"tensor_parallel_size": RANKS, "group": dist.group.WORLD}
        split["expert_parallel"] = RANKS if case.needs == "ep" else 1
    with tempfile.TemporaryDirectory() as folder:
        return Engine.from_pretrained(
            case.source.save(folder),
            device=saver.device,
            dtype=TARGET,
            kv_tokens=256,
            saver=saver,
            load_weights=False,
            cuda_graphs=False,
            **split,
        )


def _check(engine: Engine, case: Case) -> None:
    """Check that the engine's slices have the bits of the cast source."""
    with memsaver.attach(engine.saver.share("weights")) as lease:
        for piece in engine.manifest.slices:
            cast = (
                content(piece.name, piece.global_shape, engine.saver.device)
                .to(case.source.torch_dtype)
                .to(TARGET)
            )
            expected = cast[_slices(piece.start, piece.shape)]
            written = lease.tensor(
                (1 + dot([n - 1 for n in piece.shape], piece.strides),), TARGET, piece.offset
            )
            written = written.as_strided(piece.shape, piece.strides)
            assert torch.equal(
                written.view(torch.int16), expected.contiguous().view(torch.int16)
            ), f"{piece.name} was not synced"
