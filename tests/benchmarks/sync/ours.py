"""memsaver's sync: between two Ray actors on one GPU, and over two GPUs with an engine beside each trainer rank.

Its imports stay inside: the other cases' processes import the script that imports this.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.benchmarks.common import Sampler, write_config
from tests.benchmarks.sync.base import TARGET, Figure, Scale, Skipped, Source, content, medians, memory_rise
from tests.benchmarks.sync.processes import ranks
from tests.benchmarks.sync.shapes import TINY, aligned_box, moves, shard_box, tp_box, tp_dim, whole_box

if TYPE_CHECKING:
    from memsaver import MemorySaver
    from rollout import Engine
    from trainer_bridge.actor import RemoteRollout, RemoteTrainer
    from trainer_bridge.consensus import StoreConsensus
    from trainer_bridge.session import SyncReceipt
    from trainer_bridge.sources import SourceShard

ASLEEP = 0.5  # seconds, less than a training step; the driver still scrubs what a sleeping engine freed just before
WARMUP = 3
RANKS = 2


def _config(scale: Scale, source: Source, folder: Path) -> str:
    changes = TINY if scale.tiny else {"num_hidden_layers": source.layers}
    return str(write_config(folder / "model", "7b", **changes))


# ---------------------------------------------------------------- one GPU


def one_gpu(scale: Scale) -> list[Figure]:
    if not scale.on_gpu or scale.tiny:
        raise Skipped("it has no tiny form, and needs a GPU")
    figures = [figure for source in scale.sources for figure in _one_gpu(scale, source)]
    return figures + _by_pages(scale, scale.sources[0])


def _one_gpu(scale: Scale, source: Source) -> list[Figure]:
    """The write alone, and the whole sync: pages mapped, written, unmapped, read back and compared."""
    from trainer_bridge import TrainerConfig, open_ray

    with tempfile.TemporaryDirectory() as folder:
        path = _config(scale, source, Path(folder))
        config = TrainerConfig(
            model_path=path, random_init=True, dtype=source.dtype, param_dtype="bfloat16", device="cuda:0"
        )
        with open_ray(config, {"dtype": "bfloat16", "kv_tokens": 1024, "cuda_graphs": False}) as (trainer, rollout):
            risen = [_rise(trainer, rollout, version) for version in range(WARMUP)]
            rows = [_over_actors(trainer, rollout, version) for version in range(WARMUP, scale.repeats + WARMUP)]
    middle = medians(rows)
    assert middle["nbytes"] == source.params * TARGET.itemsize
    first = {"first sync's rise, MiB": risen[0] / 2**20}
    return [
        Figure(what=f"{source}: memsaver, cast, copy and digest", ms=middle["copy"], copied=source.copied),
        Figure(
            what=f"{source}: memsaver, whole sync over Ray actors",
            ms=middle["sync"],
            copied=source.copied,
            rise=max(risen[1:]),
            parts={key: middle[key] for key in ("open", "map", "write", "verify", "read back", "commit", "call")}
            | first,
        ),
    ]


def _by_pages(scale: Scale, source: Source) -> list[Figure]:
    """The engine serves the trainer's own pages: nothing moves. The first time both sides read them."""
    from trainer_bridge import TrainerConfig, open_ray

    with tempfile.TemporaryDirectory() as folder:
        path = _config(scale, source, Path(folder))
        config = TrainerConfig(model_path=path, random_init=True, dtype=source.dtype, device="cuda:0")
        engine = {"dtype": "bfloat16", "kv_tokens": 1024, "cuda_graphs": False}
        with open_ray(config, engine, alias=True) as (trainer, rollout):
            receipts = []
            for version in range(scale.repeats + WARMUP):
                receipts.append(trainer.share_weights(version))
                rollout.sleep(level=2)
    first, rest = receipts[0], receipts[WARMUP:]
    steady = statistics.median(receipt.seconds for receipt in rest) * 1e3
    adopt = statistics.median(receipt.stages["adopt"] for receipt in rest) * 1e3
    return [
        Figure(what=f"{source}: memsaver, the trainer's own pages, first time, digests read", ms=first.seconds * 1e3),
        Figure(what=f"{source}: memsaver, the trainer's own pages", ms=steady, parts={"adopt": adopt}),
    ]


def _over_actors(trainer: RemoteTrainer, rollout: RemoteRollout, version: int) -> dict[str, float]:
    time.sleep(ASLEEP)
    rollout.wake_up(["weights"])
    started = time.perf_counter()
    receipt = trainer.sync_weights(version)
    call = time.perf_counter() - started
    rollout.sleep(level=2)
    return {**_row(receipt), "call": call * 1e3}


def _rise(trainer: RemoteTrainer, rollout: RemoteRollout, version: int) -> int:
    """Bytes of the device, all processes together, during a sync. Apart from the times: who asks for the use all the
    time slows mapping down."""
    time.sleep(ASLEEP)
    rollout.wake_up(["weights"])
    with Sampler() as sampler:
        trainer.sync_weights(version)
    rollout.sleep(level=2)
    return sampler.rise


def _row(receipt: SyncReceipt) -> dict[str, float]:
    """ms and bytes."""
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
    """Where shards of two ranks go. needs: "replica" or "tp", as in `moves`. aligned: shards lie along the slices."""

    name: str
    source: Source
    needs: str
    aligned: bool


def two_gpus(scale: Scale) -> list[Figure]:
    """FSDP2 shards over two ranks into two replicas, and into two tensor-parallel ranks' weights."""
    first = scale.sources[0]
    cases = [Case("2 replicas", source, "replica", False) for source in scale.sources]
    cases += [Case(f"TP 2, {'' if aligned else 'not '}aligned", first, "tp", aligned) for aligned in (False, True)]
    seen: list[list[list[dict[str, float]]]] = ranks(_all_cases, RANKS, scale, cases)
    return [figure for case, *rounds in zip(cases, *seen, strict=True) for figure in _figures(case, rounds)]


def _figures(case: Case, seen: Sequence[Sequence[Mapping[str, float]]]) -> list[Figure]:
    """A round takes as long as its slowest rank. The bytes over the link are the plan's, and the least there can be."""
    name, source = f"{case.source}: {case.name}", case.source
    local, linked = moves(source.shapes, RANKS, case.needs, case.aligned)
    rows = [{key: max(row[key] for row in pair) for key in pair[0]} for pair in zip(*seen, strict=True)]
    middle = medians(rows)
    assert middle["linked"] <= RANKS * linked * TARGET.itemsize, "more went over the link than must"
    copied = local * (source.torch_dtype.itemsize + TARGET.itemsize)
    floor = {"copied": copied, "linked": linked * TARGET.itemsize}
    parts = {key: middle[key] for key in ("open", "map", "write", "verify", "read back", "commit")}
    rise = int(max(row["rise"] for row in rows))
    return [
        Figure(what=f"{name}: memsaver, cast, copy and digest", ms=middle["copy"], **floor),
        Figure(what=f"{name}: memsaver, whole sync", ms=middle["sync"], rise=rise, parts=parts, **floor),
    ]


def _all_cases(rank: int, scale: Scale, cases: Sequence[Case]) -> list[list[dict[str, float]]]:
    """Of each case, the rounds; in one start, for joining NCCL takes seconds."""
    consensus = _consensus(rank)
    return [_two_gpus(rank, scale, case, consensus) for case in cases]


def _consensus(rank: int) -> StoreConsensus:
    """Over a TCP store, as torchrun gives it; the group's own is a file here, which is polled."""
    import torch.distributed as dist

    from trainer_bridge.consensus import StoreConsensus

    here: list[Any] = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        here = [store.port]
    dist.broadcast_object_list(here)
    if rank:
        store = dist.TCPStore("127.0.0.1", here[0], is_master=False, wait_for_workers=False)
    return StoreConsensus(store, rank, RANKS)


def _two_gpus(rank: int, scale: Scale, case: Case, consensus: StoreConsensus) -> list[dict[str, float]]:
    import torch.distributed as dist

    from memsaver import MemorySaver
    from memsaver.places import place_of
    from trainer_bridge.session import WeightSync

    device = scale.device(rank)
    shards, tensors = _shards(rank, case, device)
    saver = MemorySaver(device=device)
    engine = _engine(scale, case, saver)
    sync = WeightSync(shards, lambda: tensors, [engine], consensus, place=place_of(device))
    with memory_rise(device) as rise:  # apart: who asks for the use all the time slows mapping down
        for version in range(WARMUP):
            sync.sync(version)
    rows = []
    for version in range(WARMUP, scale.repeats + WARMUP):
        dist.barrier()
        rows.append({**_row(sync.sync(version)), "rise": float(rise[0] if rise else 0)})
    _check(engine, case, rank)
    saver.close()
    return rows


def _shards(rank: int, case: Case, device: torch.device) -> tuple[list[SourceShard], dict[str, torch.Tensor]]:
    from trainer_bridge.sources import fsdp_shards

    tensors, shards, source = {}, [], case.source
    for name, shape in source.shapes.items():
        start, size = aligned_box(name, shape, rank, RANKS) if case.aligned else shard_box(shape, rank, RANKS)
        box = tuple(slice(first, first + n) for first, n in zip(start, size, strict=True))
        tensors[name] = content(name, shape, device)[box].to(source.torch_dtype, copy=True).contiguous()
        dim = (tp_dim(name) or 0) if case.aligned else 0
        shards += [each for each in fsdp_shards(name, shape, source.dtype, RANKS, dim) if each.rank == rank]
    return shards, tensors


def _engine(scale: Scale, case: Case, saver: MemorySaver) -> Engine:
    import torch.distributed as dist

    from rollout import Engine

    split: dict[str, Any] = {}
    if case.needs == "tp":
        split = {"tensor_parallel_size": RANKS, "group": dist.group.WORLD}
    with tempfile.TemporaryDirectory() as folder:
        return Engine.from_pretrained(
            _config(scale, case.source, Path(folder)),
            device=saver.device,
            dtype=TARGET,
            kv_tokens=256,
            saver=saver,
            load_weights=False,
            cuda_graphs=False,
            **split,
        )


def _check(engine: Engine, case: Case, rank: int) -> None:
    """AssertionError names the first slice whose bits are not the cast source's."""
    import memsaver

    with memsaver.attach(engine.saver.share("weights")) as lease:
        for piece in engine.manifest.slices:
            name, shape = piece.name, piece.global_shape
            cast = content(name, shape, engine.saver.device).to(case.source.torch_dtype).to(TARGET)
            box = tp_box(name, shape, rank, RANKS) if case.needs == "tp" else whole_box(name, shape)
            assert (piece.start, piece.shape) == box, name
            expected = cast[tuple(slice(first, first + n) for first, n in zip(*box, strict=True))].contiguous()
            found = lease.tensor(piece.shape, TARGET, piece.offset)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), f"{name} was not synced"
