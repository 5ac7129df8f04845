"""The trainer as a Ray actor, and blocking handles on the ranks of both sides.

Handles and actors (`ActorBase.call`) forward what they are asked for, by name. ray is imported when
first needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memsaver import MemorySaver
from rollout.actor_base import ActorBase, RankAddress
from rollout.requests import Completion, SamplingParams
from rollout.serving import for_each
from rollout.weights import Manifest
from trainer_bridge.config import TrainerConfig
from trainer_bridge.offload import reserve_offload
from trainer_bridge.remote.group import RemoteActor, RemoteGroup
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
        saver = self._saver or MemorySaver(device=self.config.device)
        self.held = Trainer(self.config, saver, shard_dims=shard_dims, layout=layout)

    def connect(self, rollout: RemoteRollout) -> None:
        """Speak for that engine rank; the ranks agree over their process group."""
        self.held.connect([rollout])


class RemoteTrainer(RemoteGroup):
    """Methods and contracts of `Trainer`, called on every rank; those of `ONE_RANK` on one.

    `report`, `drain_events` and `take_usage` are of one rank: ask one of `each()`.
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
        """Have each rank speak for the engine rank of its device."""
        self.call_each("connect", [(target,) for target in rollout.each()])


class RemoteRollout(RemoteGroup):
    """Methods and contracts of `rollout.Engine`, over all replicas of it.

    Each replica is `engine_size` ranks. A weight update, `report`, `drain_events` and `take_usage`
    are of one rank (`ONE_RANK`): ask one of `each()`.
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

    @property
    def weights_version(self) -> int:
        """See `Engine.weights_version`."""
        return self.call("weights_version")

    def unavailable_reason(self) -> str | None:
        """Return the reason of the first rank that has one."""
        reasons = self.call_all("unavailable_reason")
        return next((reason for reason in reasons if reason is not None), None)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Deal the prompts over the replicas; answers come in the order of the prompts. A
        replica that refuses one counts those that it was dispatched.
        """
        each = for_each(prompts, params)
        dispatched = dispatch_prompts(prompts, each, len(self._engines))
        args: list[tuple[Any, ...] | None] = [None] * len(self.ranks)
        for engine, numbers in zip(self._engines, dispatched, strict=True):
            mine = [prompts[number] for number in numbers], [each[number] for number in numbers]
            for rank in engine if numbers else ():
                args[rank] = mine
        answers = self.call_each("generate", args)
        found: dict[int, list[Completion]] = {}
        for engine, numbers in zip(self._engines, dispatched, strict=True):
            found |= zip(numbers, answers[engine.start] or (), strict=True)
        return [found[number] for number in range(len(prompts))]


def dispatch_prompts(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], replicas: int
) -> list[list[int]]:
    """Return every replica's prompts by number, ascending; the same for the same requests.

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
    """Return where each rank joins the others; None for one alone. Rank 0 opens the store."""
    if len(ranks.ranks) == 1:
        return [None]
    host, port = ranks.each()[0].call("meet")
    size, seconds = len(ranks.ranks), ranks.timeout
    return [
        RankAddress(host=host, port=port, rank=rank, size=size, seconds=seconds)
        for rank in range(size)
    ]
