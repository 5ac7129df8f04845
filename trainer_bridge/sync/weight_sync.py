"""A weight sync over all ranks, which commits a version on all targets or on none.

    prepare  check the version and the shards            nothing is touched yet
    open     every target offers its pages               undefined from now on, unless shadowed
    map      every rank maps the pages it writes into    from now on ranks may wait for each other
    write    every rank writes its copies                the ranks know the digests
    verify   every target reads its pages back           a different digest ends the sync
    commit   every target serves the version             now the trainer may release its shards

If a rank cannot map a target's pages, its bytes for the target go through another rank
(`relay.py`). A rank without shards receives the bytes of the engine in its own process, on a
machine without a trainer rank. It follows rank 0, which announces each call (`follow`).

All ranks agree after each stage (`agree.py`), so each rank knows that the others succeeded before
it begins the next stage. A stage that fails on one rank ends the sync on all ranks: targets with
shadow pages keep serving their old version, others serve nothing.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memsaver
from memsaver.ops.hash import MASK64
from memsaver.system.devices import place_of
from memsaver.system.torch_defaults import torch_defaults, with_torch_defaults
from rollout.engine import InFlight
from rollout.protocols import ShardedEngine, UpdatableEngine, sync_targets
from rollout.weights import UpdateReceipt, WeightLayout, WeightOffer, WriteReceipt
from trainer_bridge.errors import listed
from trainer_bridge.sync.agree import Agreement, group_agreement
from trainer_bridge.sync.module_tensors import named_tensors
from trainer_bridge.sync.plan import SyncPlan, make_plan
from trainer_bridge.sync.relay import Relay, Routes, Wire, obstacles
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.writer import (
    LowRank,
    Shards,
    Writer,
    check_sources,
    device_of,
    places,
    rounding,
    scratch_for,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SyncReceipt:
    """The result of a sync, equal on all ranks except for the seconds.

    Attributes:
        version: Version that all targets serve.
        digests: Digest of each target's weights.
        seconds: Duration of the whole sync.
        verify_seconds: Duration of the slowest target's verification.
        stages: Seconds of each stage, including the wait for other ranks.
        nbytes: Bytes written into all targets.
        link_bytes: Bytes among them that went from one device to another.
        node_bytes: Bytes that went from one machine to another, once for all replicas there.
        copy_seconds: Duration of this rank's copies.
        merge_lost: Share of the adapters' move (scale B A) that rounding to the served dtype took,
            over sampled layers: 0 if the whole move reached the targets, 1 if nothing did. None
            without adapters.
    """

    version: int
    digests: tuple[int, ...]
    seconds: float
    verify_seconds: float
    stages: dict[str, float]
    nbytes: int = 0
    link_bytes: int = 0
    node_bytes: int = 0
    copy_seconds: float = 0.0
    merge_lost: float | None = None

    @property
    def lossy(self) -> bool:
        """Return whether rounding took over 10 % of the adapters' move, so the rollout lags."""
        return self.merge_lost is not None and self.merge_lost > 0.1


@dataclass
class _Round:
    """The state of a sync in progress."""

    version: int
    derived: Mapping[str, LowRank]  # parameters that are computed from their shards
    opened: list[UpdatableEngine] = field(default_factory=list)  # to abort if the sync fails
    leases: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # of the pages
    pages: dict[int, Tensor] = field(default_factory=dict)  # mapped, by target
    buffers: dict[str, Tensor] = field(default_factory=dict)  # values that the targets get
    copy_seconds: float = 0.0  # duration of this rank's copies
    stages: dict[str, float] = field(default_factory=dict)  # seconds of each stage


@with_torch_defaults
class WeightSync:
    """A planned sync that writes the shards of all ranks into the pages of all targets.

    Constructor and methods are collective calls. Plan and tables are built once, and used for every
    version. Targets are engines, or handles on engines. Each target belongs to one rank, and the
    targets of all ranks in order are the plan's targets 0, 1, ... A rank writes into mapped pages
    if it can map them. Otherwise it sends messages (`relay.py`), and a warning gives the reason.

    Attributes:
        agreement: Agreement of all ranks.
        targets: Targets of this rank.
        sources: Returns this rank's tensors by name.
        plan: Copies of all ranks.
        buffers: Names of the buffers that the targets compute with.
    """

    _version: int | None = None
    _part: SyncPlan  # the plan of the last sync's kind
    _writer: Writer
    _relay: Relay | None

    def __init__(
        self,
        shards: Sequence[SourceShard],
        sources: Callable[[], Mapping[str, Tensor]],
        targets: Sequence[UpdatableEngine | ShardedEngine],
        agreement: Agreement | None = None,
        *,
        place: str,
        device: torch.device | None = None,
        ranks: tuple[int, int] | None = None,
    ) -> None:
        """Plan the sync.

        Args:
            shards: This rank's shards, and its copy of the buffers that the targets compute with.
                A rank without any receives bytes of its targets, and only calls `follow`.
            sources: Returns this rank's tensors by name; called in every sync. The tensors may
                move, and change strides and dtype.
            targets: Engines that this rank calls; may be empty. Each shard of an engine is a
                target of its own.
            agreement: Agreement of all ranks; None for a single rank.
            place: Place of this rank's device, as in `WeightLayout`.
            device: Device of this rank; None: that of the sources.
            ranks: `tensor_parallel_size` and `expert_parallel` that every engine must have; None:
                any.

        Raises:
            ValueError: Shards and targets do not fit; the text lists the differences. Nothing has
                been touched.
        """
        self.agreement = agreement = agreement or Agreement()
        self.targets = tuple(sync_targets(targets))
        self._shards, self.sources, self._ranks = tuple(shards), sources, ranks
        self._device = device or device_of(sources())
        members = agreement.agree(
            "connect", lambda: (place, list(shards), [t.weight_layout() for t in self.targets])
        )
        self._followed = any(not held for _, held, _ in members)
        counts = [len(layouts) for _, _, layouts in members]
        owners = [*chain.from_iterable([rank] * count for rank, count in enumerate(counts))]
        self._first = sum(counts[: agreement.rank])
        blocked = agreement.agree("plan", lambda: self._make_plan(members, place))
        self._routes = routes = Routes(pairs=self.plan.traffic, owners=owners, blocked=blocked)
        self._wire = None
        if routes.relayed:
            self._wire = Wire(agreement, routes, self.plan.places, self._device)
        if agreement.rank == 0:
            routes.warn()
        self._kept = memsaver.LeaseCache()
        self._made_for: object = None  # kind of the last sync, and addresses of its sources

    def _make_plan(
        self, members: Sequence[tuple[str, list[SourceShard], list[WeightLayout]]], place: str
    ) -> dict[int, str]:
        """Build the plan, the same on all ranks, and return the targets this rank cannot map."""
        shards = list(chain.from_iterable(held for _, held, _ in members))
        layouts = list(chain.from_iterable(offered for _, _, offered in members))
        for layout in layouts:
            theirs = layout.ranks, layout.expert_parallel
            if self._ranks not in (None, theirs):
                raise ValueError(
                    "an engine has tensor_parallel_size={} and expert_parallel={}, and the trainer "
                    "exact_ranks={} and exact_expert_parallel={}; make them equal".format(
                        *theirs, *self._ranks
                    )
                )
        known = dict(chain.from_iterable(layout.buffers.items() for layout in layouts))
        held = {shard.name for shard in shards}
        if missing := sorted(known.keys() - held):
            raise ValueError(
                f"the rollout computes with {listed(missing)}, which the trainer does not sync; "
                "pass module_sync the module itself, or these buffers among the parameters"
            )
        for shard in shards:
            if shard.shape != known.get(shard.name, shard.shape):
                text = f"shape {shard.shape} on rank {shard.rank}, {known[shard.name]} in the"
                raise ValueError(f"{shard.name}: {text} rollout; keep it whole on every rank")
        self.buffers = sorted(known)
        params = [shard for shard in shards if shard.name not in known]
        self.plan = make_plan(params, [where for where, _, _ in members], layouts)
        return obstacles(place, self.plan)

    def holds(self) -> bool:
        """Return whether all targets serve the version of the last sync; a collective call."""
        self._announce("holds")
        return self._holds()

    def _holds(self) -> bool:
        return self.served(self._version)

    def served(self, version: int | None) -> bool:
        """Return whether all targets serve a version; a collective call of ranks with shards."""
        served = self.agreement.agree(
            "ask", lambda: {version, *(t.served_version() for t in self.targets)}
        )
        versions = set[int | None]().union(*served)
        return len(versions) == 1 and None not in versions

    def sync(
        self,
        version: int,
        *,
        shadow: bool = False,
        in_flight: InFlight = "refuse",
        names: Collection[str] | None = None,
        derived: Mapping[str, LowRank] | None = None,
    ) -> SyncReceipt:
        """Write the current shards, verify them on both sides, and commit them on every target.

        Args:
            version: Number of the weights; not lower than that of the last sync.
            shadow: Write into a second copy, for which the targets map more pages. They serve their
                old version until the commit.
            in_flight: What the sync means for the targets' running requests.
            names: Write only these parameters, by the trainer's names. The targets' weights must be
                defined by an earlier sync.
            derived: Parameters that are computed from this rank's shard while they are written.

        Returns:
            The receipt of the sync.

        Raises:
            Exception: The error of this rank, if it failed.
            SyncError: Another rank failed; the text names stage, rank and error.
        """
        chosen = None if names is None else tuple(sorted(names))
        self._announce("sync", chosen)
        return self._sync(version, _offered(shadow, in_flight), chosen, derived or {})

    def follow(
        self, version: int, *, shadow: bool = False, in_flight: InFlight = "refuse"
    ) -> SyncReceipt:
        """Take part in the other ranks' calls until they have synced, on a rank without shards.

        Arguments, result and errors are those of `sync`.
        """
        while True:
            call, names = self.agreement.agree("announce", lambda: ("", None))[0]
            if call == "sync":
                return self._sync(version, _offered(shadow, in_flight), names, {})
            self._holds()

    def _announce(self, call: str, names: tuple[str, ...] | None = None) -> None:
        if self._followed:
            self.agreement.agree("announce", lambda: (call, names))

    def _sync(
        self,
        version: int,
        offered: Mapping[str, Any],
        chosen: tuple[str, ...] | None,
        derived: Mapping[str, LowRank],
    ) -> SyncReceipt:
        started, state = time.perf_counter(), _Round(version, derived)
        self._agree(state, "prepare", lambda: self._prepare(state, chosen))
        try:
            opened = self._agree(state, "open", lambda: self._open(state, offered, chosen))
            offers = list(chain.from_iterable(opened))
            self._agree(state, "map", lambda: self._map(state, offers))
            results = self._agree(state, "write", lambda: self._write(state))
            written = [digests for digests, _, _ in results]
            receipts = [
                self._receipt(offer, number, written, state.buffers)
                for number, offer in enumerate(offers)
            ]
            verified = self._agree(state, "verify", lambda: self._verify(receipts))
            self._agree(
                state, "commit", lambda: [target.commit_update(version) for target in self.targets]
            )
        except BaseException as error:
            _abort(state, error)
            raise
        self._version = version
        updates = chain.from_iterable(verified)
        return SyncReceipt(
            version=version,
            digests=tuple(receipt.digest for receipt in receipts),
            nbytes=sum(self._part.nbytes),
            link_bytes=sum(self._part.link_bytes.values()),
            node_bytes=sum(sent for _, sent, _ in results),
            seconds=time.perf_counter() - started,
            copy_seconds=state.copy_seconds,
            verify_seconds=max((update.seconds for update in updates), default=0.0),
            stages=state.stages,
            merge_lost=_merge_lost([sums for *_, sums in results]) if state.derived else None,
        )

    def close(self) -> None:
        """Unmap the targets' pages, which stay mapped between syncs."""
        self._kept.close()

    def _agree(self, state: _Round, stage: str, step: Callable[[], T]) -> list[T]:
        started = time.perf_counter()
        answers = self.agreement.agree(stage, step)
        state.stages[stage] = time.perf_counter() - started
        return answers

    def _prepare(self, state: _Round, names: tuple[str, ...] | None) -> None:
        if self._version is not None and state.version < self._version:
            text = f"version {state.version} is stale: version {self._version} has been written"
            raise ValueError(f"{text}; use a higher one")
        sources = self.sources()
        wanted = names, frozenset(state.derived), places(sources)
        if wanted != self._made_for:
            self._made_for = None
            now = device_of(sources)
            if now.type == "cuda" and now != self._device:
                text = f"the parameters are on {now}, and were on {self._device} when the sync was"
                raise ValueError(f"{text} connected; connect again (nothing was written)")
            self._part = self.plan if names is None else self.plan.only(names)
            self._make_tables(self._part, sources, state.derived)
            self._made_for = wanted
        state.buffers = buffer_values(sources, self.buffers)

    def _make_tables(
        self, plan: SyncPlan, sources: Mapping[str, Tensor], derived: Collection[str]
    ) -> None:
        check_sources(self._shards, sources)
        rank, self._relay = self.agreement.rank, None
        direct = (c for c in plan.copies(rank) if c.target not in self._routes.blocked[rank])
        bases = [sources[name] for name in derived if name in sources]
        scratch = scratch_for(bases, self._device)
        remote = {target for number, target in plan.link_bytes if number == rank}
        self._writer = Writer(direct, sources, derived, scratch, remote)
        if self._routes.indirect:
            self._relay = Relay(
                plan,
                self._routes,
                self._wire,
                sources,
                dict(enumerate(self.targets, start=self._first)),
                rank=rank,
                derived=derived,
                scratch=scratch,
            )

    def _open(
        self, state: _Round, offered: Mapping[str, Any], names: tuple[str, ...] | None
    ) -> list[WeightOffer]:
        offers = []
        for number, target in enumerate(self.targets, start=self._first):
            offers.append(target.begin_update(state.version, names=names, **offered))
            state.opened.append(target)
            planned = self.plan.targets[number].manifest.layout_hash
            layout = offers[-1].layout_hash
            if planned != layout:
                text = f"made for layout {planned}, the rollout offers {layout}; connect again"
                raise ValueError(f"stale plan for version {state.version}: {text}")
        return offers

    def _map(self, state: _Round, offers: Sequence[WeightOffer]) -> None:
        relayed = set[int]() if self._relay is None else self._relay.targets
        with self._current():
            for number in self._writer.targets | relayed:
                start, nbytes = offers[number].start, offers[number].nbytes
                use = self._kept.use(offers[number].ticket, at_least=start + nbytes)
                lease = state.leases.enter_context(use)
                state.pages[number] = lease.tensor((lease.nbytes,), torch.uint8)[start:]

    def _write(self, state: _Round) -> tuple[dict[int, int], int, tuple[float, float]]:
        """Write this rank's copies.

        Returns:
            Their digests by target, the bytes that went to other machines, and the sums of
            `rounding`.
        """
        with self._current(), state.leases:
            started = time.perf_counter()
            relayed = {} if self._relay is None else self._relay.run(state.pages, state.derived)
            self._writer.start(state.pages, state.derived)
            written = {**self._writer.digests(), **relayed}
            state.copy_seconds = time.perf_counter() - started
            state.pages.clear()  # tensors over the pages must not outlive the leases
            sent = 0 if self._relay is None else self._relay.node_bytes
            return written, sent, rounding(state.derived, self._writer.sources, self._part)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the shards' GPU is current, so that pages are mapped for it."""
        on_gpu = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext()

    def _receipt(
        self,
        offer: WeightOffer,
        number: int,
        written: Sequence[Mapping[int, int]],
        buffers: dict[str, Tensor],
    ) -> WriteReceipt:
        """Build the receipt of the bytes that all ranks wrote into one target."""
        return WriteReceipt(
            version=offer.version,
            layout_hash=offer.layout_hash,
            digest=sum(digests.get(number, 0) for digests in written) & MASK64,
            nbytes=self._part.nbytes[number],
            buffers=buffers,
        )

    def _verify(self, receipts: Sequence[WriteReceipt]) -> list[UpdateReceipt]:
        return [
            target.verify_update(receipts[number])
            for number, target in enumerate(self.targets, start=self._first)
        ]


@torch_defaults()
def module_sync(
    params: nn.Module | Mapping[str, Tensor], targets: Sequence[UpdatableEngine | ShardedEngine]
) -> WeightSync:
    """Plan the sync of a module's parameters, plain or sharded by FSDP2, with rollouts.

    Every rank of the default process group calls it; without one, the process is a single rank.

    Args:
        params: A module with checkpoint names, or `dict(module.named_parameters())` renamed to
            checkpoint names. Parameters may change in place, move, and change their strides.
            Buffers that rollouts compute with (router biases) are taken from a module; a mapping
            must include them.
        targets: Rollouts, or handles on rollouts, that this rank calls; may be empty.

    Returns:
        The sync; call `sync(version)` on every rank, and `close` at the end.

    Raises:
        ValueError: Parameters and rollouts do not fit, or a mapping contains a tensor that is
            neither a parameter nor a buffer and would not follow later updates.
        SyncError: Another rank failed; the text names it.
    """
    shards = Shards(lambda: named_tensors(params) if isinstance(params, nn.Module) else params)
    sync = WeightSync(
        shards.described(),
        shards.tensors,
        targets,
        group_agreement(dist.group.WORLD if dist.is_initialized() else None),
        place=place_of(next(iter(shards.tensors().values())).device),
    )
    if isinstance(params, Mapping):
        computed = [name for name, param in params.items() if not isinstance(param, nn.Parameter)]
        if strays := [name for name in computed if name not in sync.buffers]:
            raise ValueError(
                f"{strays[0]}: not a parameter, so it would not follow updates; pass the "
                "parameters themselves, renamed if needed"
            )
    return sync


def _merge_lost(sums: Sequence[tuple[float, float]]) -> float:
    served, meant = (sum(values) for values in zip(*sums, strict=True))
    return 1 - served / meant if meant else 0.0


def buffer_values(sources: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Copy the current values of tensors to the CPU in one transfer, as fp32."""
    if not names:
        return {}
    chosen = {name: sources[name] for name in names}
    flat = torch.cat([tensor.flatten().float() for tensor in chosen.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in chosen.values()])
    pairs = zip(chosen.items(), parts, strict=True)
    return {name: part.reshape(tensor.shape).clone() for (name, tensor), part in pairs}


def _offered(shadow: bool, in_flight: InFlight) -> dict[str, Any]:
    """Return the options of `begin_update`; engines of others need not know `in_flight`."""
    return {"shadow": shadow} | ({} if in_flight == "refuse" else {"in_flight": in_flight})


def _abort(state: _Round, error: BaseException) -> None:
    state.pages.clear()
    try:
        state.leases.close()
    except Exception as failure:  # report the first failure, and note this one
        error.add_note(f"a lease was not closed: {type(failure).__name__}: {failure}")
    abort_all(state.opened, error)


def abort_all(opened: Sequence[UpdatableEngine], error: BaseException) -> None:
    """Call `abort_update` on targets of a failed sync, and note further failures on the error."""
    for target in opened:
        try:
            target.abort_update(f"{type(error).__name__}: {error}")
        # The target itself may have died; report the first failure, and note this one.
        except Exception as failure:
            error.add_note(f"could not abort a target: {type(failure).__name__}: {failure}")
