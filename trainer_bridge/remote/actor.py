"""The trainer as a Ray actor, and blocking handles on the ranks of both sides.

Handles and actors (`ActorBase.call`) forward calls by method name. ray is imported on first use.
"""

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol, Self

import torch.distributed as dist

from memsaver import MemorySaver
from rollout.actor_base import ActorBase
from rollout.loop import Router, most_tokens
from rollout.process_group import Ports, RankAddress, join_apart, leave
from rollout.requests import Completion, SamplingParams, for_each
from rollout.tag_names import TAGS
from rollout.weights import Manifest
from trainer_bridge.config import TrainerConfig
from trainer_bridge.errors import ActorDied, ActorTimeout
from trainer_bridge.offload import reserve_offload
from trainer_bridge.remote.group import GRACE_SECONDS, RemoteActor, RemoteGroup
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.trainer import Trainer

CALLS = 256
"""How many calls an engine's actor takes at once, each in a thread; more requests wait for one."""


class EngineReplacer(Protocol):
    """What replaces a lost engine (`replacement.py`)."""

    left: int

    def replace(self, error: ActorDied) -> bool:
        """Replace the engine whose actor died, and return whether the new one has weights."""


class TrainerActor(ActorBase):
    """A process that owns one `Trainer` and its saver."""

    held: Trainer
    _saver: MemorySaver | None = None
    _receiving: dist.ProcessGroup | None = None

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

    def connect(self, targets: Sequence[Any], address: RankAddress | None = None) -> None:
        """Connect to engines; with an address, in a group with receiving `RolloutRankActor`s."""
        if self._receiving is not None:
            leave(self._receiving)
            self._receiving = None
        if address is not None:
            self._receiving = join_apart(address, self.held.device, self._store)
        self.held.connect(targets, self._receiving)


class RemoteTrainer(RemoteGroup):
    """A handle on all ranks of a trainer, with the methods and contracts of `Trainer`.

    Each method is called on every rank. The methods of `ONE_RANK` (`report`, `drain_events`,
    `take_usage`) differ between ranks: call them on an element of `each()`.
    """

    _rollout: "RemoteRollout | None" = None
    _owners: Sequence[int | None] = ()
    _connected = range(0)

    def build(
        self, layout: Manifest | None = None, shard_dims: Mapping[str, int] | None = None
    ) -> None:
        """Build the trainers of all ranks concurrently, with arguments of `Trainer`."""
        self.call_each(
            "build", [(layout, shard_dims, place) for place in addresses(self, self.ports)]
        )

    def reserve(self) -> None:
        """Begin to obtain host memory for offloaded tags on every rank, without waiting."""
        for rank in self.ranks:
            rank.start("reserve", len(self.ranks))

    def connect(self, rollout: "RemoteRollout", owners: Sequence[int | None]) -> None:
        """Connect each rank to the engine ranks that it owns.

        `owners` has a rank for each engine rank, or None for those that receive their bytes
        themselves, on machines without a trainer rank.
        """
        self._rollout, self._owners = rollout, owners
        self.connect_to(range(len(owners)))

    def connect_to(self, engine_ranks: range) -> None:
        """Connect to some engine ranks only; the next sync connects to all of them again."""
        assert self._rollout is not None
        owned: list[list[RemoteRollout]] = [[] for _ in self.ranks]
        for rank in engine_ranks:
            if (owner := self._owners[rank]) is not None:
                plain = RemoteRollout([self._rollout.ranks[rank]], self._rollout.timeout)
                owned[owner].append(plain)
        self._connected = range(0)  # if the connection fails
        members = self._members(engine_ranks)
        far = len(members.ranks) > len(self.ranks)
        places = addresses(members, self.ports) if far else [None] * len(self.ranks)
        targets = [*owned, *([] for _ in members.ranks[len(self.ranks) :])]
        members.call_each("connect", [*zip(targets, places, strict=True)])
        self._connected = engine_ranks

    def _members(self, engine_ranks: range) -> RemoteGroup:
        """Return the ranks of a sync: all of the trainer, and those engine ranks that receive."""
        engines = () if self._rollout is None else self._rollout.ranks
        receiving = [engines[rank] for rank in engine_ranks if self._owners[rank] is None]
        return RemoteGroup([*self.ranks, *receiving], self.timeout)

    def sync_weights(self, version: int, **how: Any) -> SyncReceipt:
        """Write, verify and serve the weights on all engines; see `Trainer.sync_weights`."""
        return self._synced("sync_weights", version, **how)

    def alias_weights(self, version: int) -> SyncReceipt:
        """Share the trainer's pages with the engine; see `Trainer.alias_weights`."""
        return self._synced("alias_weights", version)

    def sync_connected(self, method: str, version: int, **how: Any) -> SyncReceipt:
        """Run a sync once, with the engine ranks that are connected."""
        return self._members(self._connected).call(method, version, **how)

    def _synced(self, method: str, version: int, **how: Any) -> SyncReceipt:
        """Run a sync, and repeat it if engines died and were replaced."""
        while True:
            try:
                if len(self._connected) < len(self._owners):
                    self.connect_to(range(len(self._owners)))
                receipt = self.sync_connected(method, version, **how)
            except Exception as error:
                own = [rank.name for rank in self.ranks]
                if isinstance(error, ActorDied) and error.actor in own:
                    raise  # receiving ranks, which wait for it, would not answer
                if self._members(self._connected).ranks != self.ranks:
                    self._connected = range(0)  # receiving ranks may still wait for others
                if self._rollout is None or not self._rollout.replace_dead():
                    raise
            else:
                break
        if self._rollout is not None:
            self._rollout.version = version
            self._rollout.without_weights.clear()
        return receipt


class RemoteRollout(RemoteGroup):
    """A handle on all replicas of an engine, with the methods and contracts of `rollout.Engine`.

    A replica has `engine_size` ranks. The first `sleeping` ranks (None: all) share a device with a
    trainer. Calls of `sleep`, `wake_up`, `shrink` and `prepare_sleep` go to these ranks only, and
    the other ranks are always awake. The methods of `ONE_RANK` (the steps of a weight update,
    `report`, `drain_events`, `take_usage`) differ between ranks: call them on an element of
    `each()`.

    With a `replacer`, a call that finds an actor dead replaces its engine and is then repeated.

    Attributes:
        engines: Ranks of each replica.
        replacer: Replaces lost engines; None: a lost engine ends the call.
        awake: Tags of the sleeping ranks that have memory.
        version: Version of the last sync; None after a sleep.
        without_weights: Replaced engines that the next sync gives their weights.
    """

    def __init__(
        self,
        ranks: Sequence[RemoteActor],
        timeout: float,
        engine_size: int = 1,
        sleeping: int | None = None,
        replacer: EngineReplacer | None = None,
    ) -> None:
        super().__init__(ranks, timeout)
        self._sleeping = len(self.ranks) if sleeping is None else sleeping
        starts = range(0, len(self.ranks), engine_size)
        self.engines = [range(start, start + engine_size) for start in starts]
        self.replacer = replacer
        self.awake = {*TAGS}
        self.version: int | None = None
        self.without_weights: set[range] = set()

    def build(self, engines: Sequence[range] | None = None) -> None:
        """Build some engines, or all, on all of their ranks concurrently."""
        places: list[tuple[RankAddress | None] | None] = [None] * len(self.ranks)
        for engine in self.engines if engines is None else engines:
            own = addresses(self.of(engine), self.ports)
            for rank, address in zip(engine, own, strict=True):
                places[rank] = (address,)
        self.call_each("build", places)

    def of(self, engine: range) -> "RemoteRollout":
        """Return a handle on one engine, without its replacement."""
        return RemoteRollout(self.ranks[engine.start : engine.stop], self.timeout, len(engine))

    def each(self) -> list[Self]:
        """Return one handle per rank."""
        return [type(self)([rank], self.timeout, replacer=self.replacer) for rank in self.ranks]

    def engine_of(self, actor: str) -> range | None:
        """Return the engine that an actor is a rank of, by its name; None if it is of none."""
        names = [rank.name for rank in self.ranks]
        return next((e for e in self.engines if actor in names[e.start : e.stop]), None)

    def serving(self, but: range | None = None) -> list[range]:
        """Return the engines that have weights, if a sync has given them any, except for `but`."""
        return [e for e in self.engines if e not in self.without_weights and e != but]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every rank; replace an engine that is lost, and repeat the call."""
        while True:
            try:
                return super().call_all(method, *args, **kwargs)
            except ActorDied as error:
                if self.replacer is None:
                    raise
                self.replacer.replace(error)

    def replace_dead(self) -> bool:
        """Replace engines of which an actor has died, and return whether there were any."""
        if self.replacer is None or not self.replacer.left:
            return False
        dead = [error for engine in self.engines if (error := self._death(engine)) is not None]
        for error in dead:
            self.replacer.replace(error)
        return bool(dead)

    def _death(self, engine: range) -> ActorDied | None:
        try:
            self.of(engine).call_all("pid")
        except ActorDied as error:
            return error
        return None

    def abort_update(self, reason: str) -> None:
        """Let the engines refuse to serve; see `Engine.abort_update`. No lost engine is replaced.

        An engine may wait for a lost rank of the update. It aborts when that call ends, before any
        later call, so the wait for it here is short.
        """
        with contextlib.suppress(ActorTimeout):
            RemoteGroup(self.ranks, GRACE_SECONDS).call_all("abort_update", reason)

    def sleep(self, level: int = 1, *, tags: Sequence[str] | None = None, **how: Any) -> None:
        """Release the memory of tags on devices of the trainer; see `Engine.sleep`."""
        self.version = None
        self.awake -= {*(TAGS if tags is None else tags)}
        self._call_sleeping("sleep", level, tags=tags, **how)

    def wake_up(self, tags: Sequence[str] | None = None, **how: Any) -> None:
        """Map the memory of tags on devices of the trainer; see `Engine.wake_up`."""
        self._call_sleeping("wake_up", tags, **how)
        self.awake |= {*(TAGS if tags is None else tags)}

    def shrink(self) -> None:
        """Announce the last answers before a sleep; see `Engine.shrink`."""
        self._call_sleeping("shrink")

    def prepare_sleep(self) -> None:
        """Allocate host memory for sleeps at level 1; see `Engine.prepare_sleep`."""
        self._call_sleeping("prepare_sleep")

    def _call_sleeping(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._sleeping:
            sleepers = self.ranks[: self._sleeping]
            group = RemoteRollout(sleepers, self.timeout, replacer=self.replacer)
            group.call_all(method, *args, **kwargs)

    @property
    def weights_version(self) -> int:
        """Return the version of the weights; see `Engine.weights_version`."""
        return self.call("weights_version")

    def unavailable_reason(self) -> str | None:
        """Return the reason of the first rank that cannot serve; None if all ranks can."""
        reasons = self.call_all("unavailable_reason")
        return next((reason for reason in reasons if reason is not None), None)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        **how: Any,
    ) -> list[list[Completion]]:
        """Dispatch the prompts to the replicas, and generate answers in the order of the prompts.

        If a replica refuses a prompt, its error numbers only the prompts of that replica. `how` are
        further arguments of the engines' `EngineLoop.generate`.
        """
        sampling = for_each(prompts, params)
        completions: dict[int, list[Completion]] = {}
        while missing := [n for n in range(len(prompts)) if n not in completions]:
            completions |= self._generate(missing, prompts, sampling, how)
        return [completions[number] for number in range(len(prompts))]

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: Hashable | None = None,
        **how: Any,
    ) -> Future[list[Completion]]:
        """Begin to answer a request, together with others, on the engine that `Router` picks.

        Args:
            prompt: Token ids.
            params: Sampling parameters.
            key: As in `Router.pick`.
            **how: Further arguments of the engine's `EngineLoop.generate`.

        Returns:
            The samples, or the error; ActorDied if the engine is lost, which replaces none.
        """
        tokens = most_tokens(prompt, params)
        engine = self._router.pick(self.serving(), tokens, key)

        def answer() -> list[Completion]:
            try:
                return self.of(engine).generate([prompt], [params], **how)[0]
            finally:
                self._router.done(engine, tokens)

        return self._callers.submit(answer)

    @cached_property
    def _router(self) -> Router:
        return Router()

    @cached_property
    def _callers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(CALLS, thread_name_prefix="rollout")

    def _generate(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        how: Mapping[str, Any],
    ) -> dict[int, list[Completion]]:
        """Generate answers to some prompts, by number; those of lost engines may be missing."""
        engines = self.serving()
        chosen = [prompts[n] for n in numbers], [sampling[n] for n in numbers]
        dispatched = dispatch_prompts(*chosen, len(engines))
        asked = dict[int, tuple[Any, ...]]()  # of the first ranks, by rank; the others follow
        for engine, places in zip(engines, dispatched, strict=True):
            if places:
                asked[engine.start] = tuple([*map(part.__getitem__, places)] for part in chosen)

        def start(engine: Sequence[int]) -> dict[int, Any]:
            first, *others = engine
            if first not in asked:
                return {}
            following = {rank: self.ranks[rank].start("follow") for rank in others}
            return {first: self.ranks[first].start("generate", *asked[first], **how), **following}

        def again(rank: int, error: ActorDied) -> dict[int, Any]:
            """Replace a lost engine, and give the new one the prompts again if it has weights."""
            if self.replacer is None:
                raise error
            engine, served = self.engine_of(error.actor) or (), self.replacer.replace(error)
            return start(engine) if served else dict.fromkeys(engine)

        started = dict[int, Any]()
        for engine in engines:
            started |= start(engine)
        references = [*map(started.get, range(len(self.ranks)))]
        answers = self._gather("generate", references, again, called=len(asked))
        completions: dict[int, list[Completion]] = {}
        for engine, places in zip(engines, dispatched, strict=True):
            if answers[engine.start] is not None:
                own = map(numbers.__getitem__, places)
                completions |= zip(own, answers[engine.start], strict=True)
        return completions


def introduce(trainer: Any, rollout: Any) -> None:
    """Register both sides of a device with each other, so that they can hand memory over."""
    trainer.hand_over_to(rollout.as_peer())
    rollout.hand_over_to(trainer.as_peer())


def dispatch_prompts(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], replicas: int
) -> list[list[int]]:
    """Divide prompts among replicas deterministically; return ascending indices by replica.

    The longest requests choose first, see `Router`.
    """
    work = [*map(most_tokens, prompts, params)]
    dispatched: list[list[int]] = [[] for _ in range(replicas)]
    router = Router()
    for number in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        dispatched[router.pick(range(replicas), work[number])].append(number)
    return [sorted(numbers) for numbers in dispatched]


def addresses(ranks: RemoteGroup, ports: Ports | None) -> list[RankAddress | None]:
    """Return where each rank joins the process group; None for a single rank.

    Rank 0 opens the store, on one of `ports` if they are given.
    """
    if len(ranks.ranks) == 1:
        return [None]
    host, port = ranks.each()[0].call("meet", ports)
    size, seconds = len(ranks.ranks), ranks.timeout
    return [
        RankAddress(host=host, port=port, rank=rank, size=size, seconds=seconds)
        for rank in range(size)
    ]
