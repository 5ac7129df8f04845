"""The trainer as a Ray actor, and blocking handles on the ranks of both sides.

Each handle lists what it forwards, and how. The actors (`ActorBase.call`) forward whatever they are
asked for, so a new method of `Engine` or `Trainer` is one line here. ray is imported when first
needed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from memsaver import MemorySaver
from rollout import Engine
from rollout.actor_base import ActorBase, RankAddress
from rollout.protocols import Progress
from rollout.serving import for_each
from rollout.types import Completion, Manifest, PackedBox, SamplingParams
from trainer_bridge.config import TrainerConfig
from trainer_bridge.offload import reserve_offload
from trainer_bridge.remote.group import RemoteActor, RemoteGroup, forwarded
from trainer_bridge.sync.agree import group_consensus
from trainer_bridge.trainer import Trainer


class TrainerActor(ActorBase):
    """A `Trainer` with a saver of its own, in a process of its own."""

    held: Trainer
    _saver: MemorySaver | None = None

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config

    def reserve(self, ranks: int) -> None:
        """Begin to obtain host memory for what will be offloaded, as one of so many ranks."""
        self._saver = MemorySaver(device=self.config.device)
        reserve_offload(self.config, ranks, self._saver)

    def build(
        self,
        layout: Manifest | None = None,
        shard_dims: Mapping[str, int] | None = None,
        address: RankAddress | None = None,
    ) -> None:
        """Make the trainer. address: this one's among several ranks. The rest is `Trainer`'s."""
        self._join(address, self.config.device)
        self._key = None if address is None else address.key
        saver = self._saver or MemorySaver(device=self.config.device)
        self.held = Trainer(self.config, saver, shard_dims=shard_dims, layout=layout)

    def connect(self, rollout: RemoteRollout) -> None:
        """Speak for that engine rank; the ranks agree over their process group."""
        assert dist.group.WORLD is not None
        self.held.connect([rollout], group_consensus(dist.group.WORLD, key=self._key))


class RemoteTrainer(RemoteGroup):
    """Methods and contracts of `Trainer`, called on every rank.

    `report`, `drain_events` and `take_usage` are of one rank: ask one of `each()`. A method that is
    not listed here is called by its name: `call("zero_grad")`.
    """

    def build(
        self, layout: Manifest | None = None, shard_dims: Mapping[str, int] | None = None
    ) -> None:
        """Make the trainer of every rank, all at the same time."""
        self.call_each("build", [(layout, shard_dims, address) for address in addresses(self)])

    def reserve(self) -> None:
        """Have every rank begin to obtain host memory for what will be offloaded; waits for
        nobody.
        """
        for rank in self.ranks:
            rank.start("reserve", len(self.ranks))

    def connect(self, rollout: RemoteRollout) -> None:
        """Each rank speaks for the engine rank of its device."""
        self.call_each("connect", [(target,) for target in rollout.each()])

    compute_log_prob = forwarded(Trainer.compute_log_prob)
    compute_ref_log_prob = forwarded(Trainer.compute_ref_log_prob)
    compute_values = forwarded(Trainer.compute_values)
    update_actor = forwarded(Trainer.update_actor)
    update_critic = forwarded(Trainer.update_critic)
    offload = forwarded(Trainer.offload)
    reload = forwarded(Trainer.reload)
    empty_cache = forwarded(Trainer.empty_cache)
    as_peer = forwarded(Trainer.as_peer, one=True)
    hand_over_to = forwarded(Trainer.hand_over_to, one=True)
    sync_weights = forwarded(Trainer.sync_weights)
    alias_weights = forwarded(Trainer.alias_weights)
    save_checkpoint = forwarded(Trainer.save_checkpoint)
    load_checkpoint = forwarded(Trainer.load_checkpoint)
    save_adapters = forwarded(Trainer.save_adapters)
    # As the saver declares them: a Trainer may have none, an actor's has one.
    report = forwarded(MemorySaver.report, one=True)
    drain_events = forwarded(MemorySaver.drain_events, one=True)
    take_usage = forwarded(MemorySaver.take_usage, one=True)


class RemoteRollout(RemoteGroup):
    """Methods and contracts of `rollout.Engine`, over all replicas of it.

    Each replica is `engine_size` ranks. A weight update, `report`, `drain_events` and `take_usage`
    are of one rank: ask one of `each()`. A method that is not listed here is called by its name:
    `call("check_integrity")`.
    """

    def __init__(self, ranks: Sequence[RemoteActor], timeout: float, engine_size: int = 1) -> None:
        super().__init__(ranks, timeout)
        starts = range(0, len(self.ranks), engine_size)
        self._engines = [range(start, start + engine_size) for start in starts]

    def build(self) -> None:
        """Make the engine of every rank, all at the same time."""
        found: list[RankAddress | None] = []
        for engine in self._engines:
            found += addresses(type(self)(self.ranks[engine.start : engine.stop], self.timeout))
        self.call_each("build", [(address,) for address in found])

    sleep = forwarded(Engine.sleep)
    wake_up = forwarded(Engine.wake_up)
    shrink = forwarded(Engine.shrink)
    prepare_sleep = forwarded(Engine.prepare_sleep)
    served_version = forwarded(Engine.served_version)
    abort_update = forwarded(Engine.abort_update)
    as_peer = forwarded(Engine.as_peer, one=True)
    hand_over_to = forwarded(Engine.hand_over_to, one=True)
    weight_layout = forwarded(Engine.weight_layout, one=True)
    begin_update = forwarded(Engine.begin_update, one=True)
    verify_update = forwarded(Engine.verify_update, one=True)
    commit_update = forwarded(Engine.commit_update, one=True)
    alias_update = forwarded(Engine.alias_update, one=True)
    report = forwarded(Engine.report, one=True)
    drain_events = forwarded(Engine.drain_events, one=True)
    take_usage = forwarded(Engine.take_usage, one=True)

    @property
    def weights_version(self) -> int:
        """See `Engine.weights_version`."""
        return self.call("weights_version")

    def unavailable_reason(self) -> str | None:
        """Returns the reason of the first rank that has one."""
        reasons = self.call_all("unavailable_reason")
        return next((reason for reason in reasons if reason is not None), None)

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """`data` is copied once: a view would take all bytes of its buffer along."""
        self.call_one("write_update", boxes, data.clone())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """The prompts are dispatched over the replicas; answers come in the order of the prompts. A
        replica that refuses one counts those that it was dispatched.

        on_progress runs in the actor: pass something picklable that sends the numbers on.
        ValueError with several replicas, whose numbers nobody adds up.
        """
        each = for_each(prompts, params)
        if on_progress is not None and len(self._engines) > 1:
            text = f"on_progress is for one engine, these are {len(self._engines)} replicas"
            raise ValueError(f"{text}; leave it away")
        dispatched = dispatch_prompts(prompts, each, len(self._engines))
        args: list[tuple[Any, ...] | None] = [None] * len(self.ranks)
        for engine, numbers in zip(self._engines, dispatched, strict=True):
            mine = [prompts[number] for number in numbers], [each[number] for number in numbers]
            for rank in engine if numbers else ():
                args[rank] = (*mine, on_progress if rank == engine.start else None)
        answers = self.call_each("generate", args)
        found: dict[int, list[Completion]] = {}
        for engine, numbers in zip(self._engines, dispatched, strict=True):
            found |= zip(numbers, answers[engine.start] or (), strict=True)
        return [found[number] for number in range(len(prompts))]


def dispatch_prompts(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], replicas: int
) -> list[list[int]]:
    """Returns every replica's prompts by number, ascending; the same for the same requests.

    The longest go first, each to the replica that has the least to do: so much at most as the
    tokens of the prompt and of all its answers.
    """
    requests = zip(prompts, params, strict=True)
    work = [len(ids) + max(each.n, each.beam_width) * each.max_tokens for ids, each in requests]
    dispatched: list[list[int]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for number in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        least = load.index(min(load))
        dispatched[least].append(number)
        load[least] += work[number]
    return [sorted(numbers) for numbers in dispatched]


def addresses(ranks: RemoteGroup) -> list[RankAddress | None]:
    """Returns where each rank joins the others; None for one alone. Rank 0 opens the store."""
    if len(ranks.ranks) == 1:
        return [None]
    host, port = ranks.each()[0].call("meet")
    size, seconds = len(ranks.ranks), ranks.timeout
    key = secrets.token_bytes(32)
    return [
        RankAddress(host=host, port=port, rank=rank, size=size, seconds=seconds, key=key)
        for rank in range(size)
    ]
