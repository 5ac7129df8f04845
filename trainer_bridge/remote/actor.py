"""The trainer as a Ray actor, and blocking handles on the ranks of both sides.

Handles and actors (`ActorBase.call`) forward calls by method name. ray is imported on first use.
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
    """A process that owns one `Trainer` and its saver."""

    held: Trainer
    _saver: MemorySaver | None = None

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config

    def reserve(self, ranks: int) -> None:
        """Begin to obtain host memory for offloaded tags, as one of `ranks` ranks."""
        self._saver = MemorySaver(device=self.config.device)
        reserve_offload(self.config, ranks, self._saver)

    def build(
        self,
        layout: Manifest | None = None,
        shard_dims: Mapping[str, int] | None = None,
        address: RankAddress | None = None,
    ) -> None:
        """Build the trainer, which joins the process group at `address`; None for a single rank."""
        self._join(address, self.config.device)
        saver = self._saver or MemorySaver(device=self.config.device)
        self.held = Trainer(self.config, saver, shard_dims=shard_dims, layout=layout)

    def connect(self, rollout: RemoteRollout) -> None:
        """Connect this rank to one engine rank."""
        self.held.connect([rollout])


class RemoteTrainer(RemoteGroup):
    """A handle on all ranks of a trainer, with the methods and contracts of `Trainer`.

    Each method is called on every rank. The methods of `ONE_RANK` (`report`, `drain_events`,
    `take_usage`) differ between ranks: call them on an element of `each()`.
    """

    def build(
        self, layout: Manifest | None = None, shard_dims: Mapping[str, int] | None = None
    ) -> None:
        """Build the trainers of all ranks concurrently, with arguments of `Trainer`."""
        self.call_each("build", [(layout, shard_dims, address) for address in addresses(self)])

    def reserve(self) -> None:
        """Begin to obtain host memory for offloaded tags on every rank, without waiting."""
        for rank in self.ranks:
            rank.start("reserve", len(self.ranks))

    def connect(self, rollout: RemoteRollout) -> None:
        """Connect each rank to the engine rank of its device."""
        self.call_each("connect", [(target,) for target in rollout.each()])


class RemoteRollout(RemoteGroup):
    """A handle on all replicas of an engine, with the methods and contracts of `rollout.Engine`.

    A replica has `engine_size` ranks. The methods of `ONE_RANK` (the steps of a weight update,
    `report`, `drain_events`, `take_usage`) differ between ranks: call them on an element of
    `each()`.
    """

    def __init__(self, ranks: Sequence[RemoteActor], timeout: float, engine_size: int = 1) -> None:
        super().__init__(ranks, timeout)
        starts = range(0, len(self.ranks), engine_size)
        self._engines = [range(start, start + engine_size) for start in starts]

    def build(self) -> None:
        """Build the engines of all ranks concurrently."""
        places: list[RankAddress | None] = []
        for engine in self._engines:
            places += addresses(type(self)(self.ranks[engine.start : engine.stop], self.timeout))
        self.call_each("build", [(address,) for address in places])

    @property
    def weights_version(self) -> int:
        """Return the version of the weights; see `Engine.weights_version`."""
        return self.call("weights_version")

    def unavailable_reason(self) -> str | None:
        """Return the reason of the first rank that cannot serve; None if all ranks can."""
        reasons = self.call_all("unavailable_reason")
        return next((reason for reason in reasons if reason is not None), None)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Dispatch the prompts to the replicas, and generate answers in the order of the prompts.

        If a replica refuses a prompt, its error numbers only the prompts of that replica.
        """
        sampling = for_each(prompts, params)
        dispatched = dispatch_prompts(prompts, sampling, len(self._engines))
        args: list[tuple[Any, ...] | None] = [None] * len(self.ranks)
        for engine, numbers in zip(self._engines, dispatched, strict=True):
            share = [prompts[n] for n in numbers], [sampling[n] for n in numbers]
            for rank in engine if numbers else ():
                args[rank] = share
        answers = self.call_each("generate", args)
        completions: dict[int, list[Completion]] = {}
        for engine, numbers in zip(self._engines, dispatched, strict=True):
            completions |= zip(numbers, answers[engine.start] or (), strict=True)
        return [completions[number] for number in range(len(prompts))]


def dispatch_prompts(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], replicas: int
) -> list[list[int]]:
    """Divide prompts among replicas deterministically; return ascending indices by replica.

    The longest requests go first, each to the replica with the least work. The work of a request is
    the number of its prompt tokens plus the most tokens that its answers may have.
    """
    work = [
        len(ids) + max(sampling.n, sampling.beam_width) * sampling.max_tokens
        for ids, sampling in zip(prompts, params, strict=True)
    ]
    dispatched: list[list[int]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for number in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        least = load.index(min(load))
        dispatched[least].append(number)
        load[least] += work[number]
    return [sorted(numbers) for numbers in dispatched]


def addresses(ranks: RemoteGroup) -> list[RankAddress | None]:
    """Return where each rank joins the process group; None for a single rank.

    Rank 0 opens the store.
    """
    if len(ranks.ranks) == 1:
        return [None]
    host, port = ranks.each()[0].call("meet")
    size, seconds = len(ranks.ranks), ranks.timeout
    return [
        RankAddress(host=host, port=port, rank=rank, size=size, seconds=seconds)
        for rank in range(size)
    ]
