"""The trainer as a Ray actor, and blocking handles on the ranks of both sides. ray is imported when first needed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import memsaver
from rollout.protocols import Progress
from rollout.rendezvous import Seat, join, open_store
from rollout.serving.intake import for_each
from rollout.types import (
    CommitReceipt,
    Completion,
    Manifest,
    PackedBox,
    SamplingParams,
    VerifyReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)
from trainer_bridge.config import TrainerConfig
from trainer_bridge.remote.group import RemoteActor, RemoteGroup
from trainer_bridge.remote.load_balance import deal_prompts
from trainer_bridge.sync.consensus import group_consensus
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.trainer import Trainer
from trainer_bridge.training.batch import SequenceBatch

if TYPE_CHECKING:
    from torch import Tensor

    from memsaver import Event, Report, Ticket, Usage


class TrainerActor:
    """A `Trainer` with a saver of its own, in a process of its own. Methods are the trainer's.

    Made empty, so that the process starts while others work; `build` takes the memory.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self._store: Any = None

    def meet(self) -> tuple[str, int]:
        """Host and port at which the other ranks join this one, which is rank 0."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def build(
        self, layout: Manifest | None = None, shard_dims: Mapping[str, int] | None = None, seat: Seat | None = None
    ) -> None:
        """seat: among several ranks, all of which call this at the same time. The rest is `Trainer`'s."""
        if seat is not None:
            join(seat, torch.device(self.config.device), self._store)
        self._key = None if seat is None else seat.key
        self.saver = memsaver.MemorySaver(device=self.config.device)
        self.trainer = Trainer(self.config, self.saver, shard_dims=shard_dims, layout=layout)

    def compute_log_prob(
        self, batch: SequenceBatch, temperature: float | None = None, *, base: bool = False
    ) -> list[list[float]]:
        return self.trainer.compute_log_prob(batch, temperature, base=base)

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        return self.trainer.update_actor(batch)

    def compute_ref_log_prob(self, batch: SequenceBatch, temperature: float | None = None) -> list[list[float]]:
        return self.trainer.compute_ref_log_prob(batch, temperature)

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]:
        return self.trainer.compute_values(batch)

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
        return self.trainer.update_critic(batch)

    def park(self, *tags: str) -> None:
        self.trainer.park(*tags)

    def restore(self, *tags: str) -> None:
        self.trainer.restore(*tags)

    def empty_cache(self) -> None:
        self.trainer.empty_cache()

    def connect(self, rollout: RemoteRollout) -> None:
        assert dist.group.WORLD is not None
        self.trainer.connect([rollout], group_consensus(dist.group.WORLD, key=self._key))

    def sync_weights(self, version: int) -> SyncReceipt:
        return self.trainer.sync_weights(version)

    def share_weights(self, version: int, *, verify: bool | None = None) -> SyncReceipt:
        return self.trainer.share_weights(version, verify=verify)

    def save_checkpoint(self, directory: str, extra: dict[str, Any] | None = None) -> None:
        self.trainer.save_checkpoint(directory, extra)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        return self.trainer.load_checkpoint(directory)

    def save_adapters(self, directory: str) -> None:
        self.trainer.save_adapters(directory)

    def report(self) -> Report:
        return self.saver.report()

    def drain_events(self) -> list[Event]:
        return self.saver.drain_events()

    def take_usage(self) -> Usage:
        return self.saver.take_usage()

    def pid(self) -> int:
        return os.getpid()


class RemoteTrainer(RemoteGroup):
    """Methods and contracts of `Trainer`, called on every rank. `report`, `drain_events` and `take_usage` are of one
    rank: ask one of `each()`."""

    def build(self, layout: Manifest | None = None, shard_dims: Mapping[str, int] | None = None) -> None:
        self.call_each("build", [(layout, shard_dims, seat) for seat in seats(self)])

    def compute_log_prob(
        self, batch: SequenceBatch, temperature: float | None = None, *, base: bool = False
    ) -> list[list[float]]:
        return self.call("compute_log_prob", batch, temperature, base=base)

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        return self.call("update_actor", batch)

    def compute_ref_log_prob(self, batch: SequenceBatch, temperature: float | None = None) -> list[list[float]]:
        return self.call("compute_ref_log_prob", batch, temperature)

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]:
        return self.call("compute_values", batch)

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
        return self.call("update_critic", batch)

    def park(self, *tags: str) -> None:
        self.call("park", *tags)

    def restore(self, *tags: str) -> None:
        self.call("restore", *tags)

    def empty_cache(self) -> None:
        self.call("empty_cache")

    def connect(self, rollout: RemoteRollout) -> None:
        """Each rank speaks for the engine rank of its device."""
        self.call_each("connect", [(target,) for target in rollout.each()])

    def sync_weights(self, version: int) -> SyncReceipt:
        return self.call("sync_weights", version)

    def share_weights(self, version: int, *, verify: bool | None = None) -> SyncReceipt:
        return self.call("share_weights", version, verify=verify)

    def save_checkpoint(self, directory: str, extra: dict[str, Any] | None = None) -> None:
        self.call("save_checkpoint", directory, extra)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        return self.call("load_checkpoint", directory)

    def save_adapters(self, directory: str) -> None:
        self.call("save_adapters", directory)

    def report(self) -> Report:
        return self.call_one("report")

    def drain_events(self) -> list[Event]:
        return self.call_one("drain_events")

    def take_usage(self) -> Usage:
        return self.call_one("take_usage")


class RemoteRollout(RemoteGroup):
    """Methods and contracts of `rollout.Engine`, over all replicas of it, each of which is `engine_size` ranks.

    A weight update, `report`, `drain_events` and `take_usage` are of one rank: ask one of `each()`.
    """

    def __init__(self, ranks: Sequence[RemoteActor], timeout: float, engine_size: int = 1) -> None:
        super().__init__(ranks, timeout)
        self._engines = [range(first, first + engine_size) for first in range(0, len(self.ranks), engine_size)]

    def build(self) -> None:
        engines = [type(self)([self.ranks[rank] for rank in engine], self.timeout) for engine in self._engines]
        self.call_each("build", [(seat,) for engine in engines for seat in seats(engine)])

    @property
    def weights_version(self) -> int:
        return self.call("weights_version")

    def served_version(self) -> int | None:
        return self.call("served_version")

    def unavailable_reason(self) -> str | None:
        """Of the first rank that has one."""
        return next((reason for reason in self.call_all("unavailable_reason") if reason is not None), None)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """The prompts are dealt over the replicas; answers come in the order of the prompts. A replica that refuses one
        counts those that it was dealt.

        on_progress runs in the actor: pass something picklable that sends the numbers on. ValueError with several
        replicas, whose numbers nobody adds up.
        """
        each = for_each(prompts, params)
        if on_progress is not None and len(self._engines) > 1:
            raise ValueError(f"on_progress is for one engine, these are {len(self._engines)} replicas; leave it away")
        dealt = deal_prompts(prompts, each, len(self._engines))
        args: list[tuple[Any, ...] | None] = [None] * len(self.ranks)
        for engine, numbers in zip(self._engines, dealt, strict=True):
            mine = [prompts[number] for number in numbers], [each[number] for number in numbers]
            for rank in engine if numbers else ():
                args[rank] = (*mine, on_progress if rank == engine.start else None)
        answers = self.call_each("generate", args)
        found: dict[int, list[Completion]] = {}
        for engine, numbers in zip(self._engines, dealt, strict=True):
            found |= zip(numbers, answers[engine.start] or (), strict=True)
        return [found[number] for number in range(len(prompts))]

    def sleep(self, level: int = 1, unfinished: str = "raise", tags: Sequence[str] | None = None) -> None:
        self.call("sleep", level, unfinished, tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.call("wake_up", tags)

    def weight_layout(self) -> WeightLayout:
        return self.call_one("weight_layout")

    def begin_update(self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None) -> WeightOffer:
        return self.call_one("begin_update", version, shadow=shadow, names=names)

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """`data` is copied once: a view would take all bytes of its buffer along."""
        self.call_one("write_update", boxes, data.clone())

    def verify_update(self, receipt: WriteReceipt) -> VerifyReceipt:
        return self.call_one("verify_update", receipt)

    def commit_update(self, version: int) -> CommitReceipt:
        return self.call_one("commit_update", version)

    def adopt_update(self, version: int, ticket: Ticket, layout_hash: str, digest: int | None = None) -> CommitReceipt:
        return self.call_one("adopt_update", version, ticket, layout_hash, digest)

    def abort_update(self, reason: str) -> None:
        self.call("abort_update", reason)

    def report(self) -> Report:
        return self.call_one("report")

    def drain_events(self) -> list[Event]:
        return self.call_one("drain_events")

    def take_usage(self) -> Usage:
        return self.call_one("take_usage")


def seats(ranks: RemoteGroup) -> list[Seat | None]:
    """Where each rank joins the others; None for one alone. Rank 0 opens the store."""
    if len(ranks.ranks) == 1:
        return [None]
    host, port = ranks.each()[0].call("meet")
    size, seconds = len(ranks.ranks), ranks.timeout
    key = secrets.token_bytes(32)
    return [Seat(host=host, port=port, rank=rank, size=size, seconds=seconds, key=key) for rank in range(size)]
