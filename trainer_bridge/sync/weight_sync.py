"""One weight sync over all ranks: prepare, open, write, verify, commit, or nothing that anybody
serves.

    prepare  newer? the shards where they were?          nothing is touched yet
    open     every target offers its pages               without shadow pages: undefined from now on
    map      every rank maps the pages it writes into    from here on ranks may wait for each other
    write    every rank writes its copies                both sides know digests
    verify   every target reads its pages back           digests are the same, or the sync ends
    commit   every target serves the version             only now may the trainer give up its shards

Bytes for targets whose pages a rank cannot map go by way of others (`relay.py`).

After each stage all ranks agree (`agree.py`), so each knows that the others succeeded before it
begins the next. A stage that fails anywhere ends the sync everywhere: targets with shadow pages
serve their old version, others none.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memsaver
from memsaver.ops.hash import MASK64
from memsaver.system.devices import place_of
from rollout.model import stored_buffers
from rollout.protocols import UpdatableEngine
from rollout.weights import UpdateReceipt, WeightLayout, WeightOffer, WriteReceipt
from trainer_bridge.errors import listed
from trainer_bridge.sync.agree import Agreement, group_agreement
from trainer_bridge.sync.plan import SyncPlan, make_plan
from trainer_bridge.sync.relay import Relay, Routes, Wire, obstacles
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.writer import (
    LowRank,
    Shards,
    Writer,
    check_sources,
    device_of,
    rounding,
    scratch_for,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SyncReceipt:
    """A version that all targets serve. It is the same on every rank, but for the seconds.

    digests: of each target. nbytes: written, all targets together; link_bytes: of them, from one
    device to another. seconds: of the whole sync; stages: of each stage, waiting included;
    copy_seconds: of this rank's copies; verify_seconds: of the slowest target's reading back.
    merge_error: of adapters that were merged, the share of what they add that rounding to the
    served dtype lost, 0 to 1, by norms over sampled layers; None without adapters.
    """

    version: int
    digests: tuple[int, ...]
    seconds: float
    verify_seconds: float
    stages: dict[str, float]
    nbytes: int = 0
    link_bytes: int = 0
    copy_seconds: float = 0.0
    merge_error: float | None = None

    @property
    def lossy(self) -> bool:
        """Return whether so much of the adapters was lost that the rollout lags behind them."""
        return self.merge_error is not None and self.merge_error > 0.1


@dataclass
class _Round:
    """One sync under way. opened: targets that are to be told if it fails."""

    version: int
    derived: Mapping[str, LowRank]
    opened: list[UpdatableEngine] = field(default_factory=list)
    leases: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pages: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    copy_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


class WeightSync:
    """Writes shards of all ranks into the pages of all targets, version by version; plans and
    tables are made once.

    All ranks make it, and call `sync`, together. Targets are the engines, or handles on them, that
    this rank speaks for: each is one rank's, and in the order of the ranks they are the plan's
    targets 0, 1, ... Bytes go into mapped pages wherever a rank can map them; where it can't they
    go by messages (`relay.py`), and a warning says why.
    """

    def __init__(
        self,
        shards: Sequence[SourceShard],
        sources: Callable[[], Mapping[str, Tensor]],
        targets: Sequence[UpdatableEngine],
        agreement: Agreement | None = None,
        *,
        place: str,
    ) -> None:
        """Make the plan.

        Args:
            shards: This rank's, and its copy of the buffers that the targets compute with.
            sources: Returns this rank's tensors, by name, and is asked with every sync; they may
                move, and change strides and dtype.
            targets: Those that this rank speaks for, perhaps none.
            agreement: Of all ranks; None: this rank is alone.
            place: Of this rank's device, as in `WeightLayout`.

        Raises:
            ValueError: Lists what does not fit; nothing has been touched then.
        """
        self.agreement = agreement = agreement or Agreement()
        self.targets = tuple(targets)
        self._shards = tuple(shards)
        self.sources = sources
        self._version: int | None = None
        self._device = device_of(sources())
        said = agreement.agree(
            "connect", lambda: (place, list(shards), [t.weight_layout() for t in targets])
        )
        counts = [len(layouts) for _, _, layouts in said]
        self._first = sum(counts[: agreement.rank])
        blocked = agreement.agree("plan", lambda: self._make_plan(said, place))
        speakers = list(chain.from_iterable([rank] * n for rank, n in enumerate(counts)))
        self._routes = Routes(pairs=self.plan.traffic, speakers=speakers, blocked=blocked)
        self._wire = None
        if self._routes.relayed:
            self._wire = Wire(agreement, self._routes, self.plan.places, self._device)
        if agreement.rank == 0:
            self._routes.warn()
        self._kept = memsaver.LeaseCache()
        self._made_for: object = None  # the last kind of sync, and where its sources were
        self._part: SyncPlan  # what that kind of sync writes
        self._writer: Writer
        self._relay: Relay | None

    def _make_plan(
        self, said: Sequence[tuple[str, list[SourceShard], list[WeightLayout]]], place: str
    ) -> dict[int, str]:
        """Make the plan, the same on all ranks; return what this one cannot map."""
        shards = list(chain.from_iterable(theirs for _, theirs, _ in said))
        layouts = list(chain.from_iterable(theirs for _, _, theirs in said))
        known = dict(chain.from_iterable(each.buffers.items() for each in layouts))
        held = {shard.name for shard in shards}
        if missing := sorted(known.keys() - held):
            raise ValueError(
                f"the rollout computes with {listed(missing)}, which the trainer does not sync; "
                "pass module_sync the module itself, or these buffers among the parameters"
            )
        for shard in shards:
            if shard.shape != known.get(shard.name, shard.shape):
                theirs = f"{known[shard.name]} in the rollout; keep it whole on every rank"
                text = f"shape {shard.shape} on rank {shard.rank}, {theirs}"
                raise ValueError(f"{shard.name}: {text}")
        self.buffers = sorted(known)
        params = [shard for shard in shards if shard.name not in known]
        self.plan = make_plan(params, [where for where, _, _ in said], layouts)
        return obstacles(place, self.plan)

    def holds(self) -> bool:
        """Tells whether all targets serve what the last sync wrote. All ranks ask."""
        said = self.agreement.agree(
            "ask", lambda: {self._version, *(t.served_version() for t in self.targets)}
        )
        versions = set[int | None]().union(*said)
        return len(versions) == 1 and None not in versions

    def sync(
        self,
        version: int,
        *,
        shadow: bool = False,
        names: Collection[str] | None = None,
        derived: Mapping[str, LowRank] | None = None,
    ) -> SyncReceipt:
        """Write the shards as they are now, verify them on both sides, and have every target serve
        them as `version`.

        Args:
            version: Not lower than that of the last sync.
            shadow: Targets take pages for a second copy, and serve their old version until the
                commit.
            names: Write these parameters only, by the trainer's names, over weights that are
                defined (`LowRank`, after a whole sync).
            derived: The parameters that are written as a function of this rank's shard of them.

        Raises:
            Exception: What went wrong here.
            SyncError: Names the stage, the rank and its error.
        """
        started, state = time.perf_counter(), _Round(version, derived or {})
        chosen = None if names is None else tuple(sorted(names))
        self._agree(state, "prepare", lambda: self._prepare(state, chosen))
        try:
            offered = self._agree(state, "open", lambda: self._open(state, shadow, chosen))
            offers = list(chain.from_iterable(offered))
            self._agree(state, "map", lambda: self._map(state, offers))
            said = self._agree(state, "write", lambda: self._write(state))
            written = [each for each, _ in said]
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
        checks = chain.from_iterable(verified)
        return SyncReceipt(
            version=version,
            digests=tuple(receipt.digest for receipt in receipts),
            nbytes=sum(self._part.nbytes),
            link_bytes=sum(self._part.link_bytes.values()),
            seconds=time.perf_counter() - started,
            copy_seconds=state.copy_seconds,
            verify_seconds=max((each.seconds for each in checks), default=0.0),
            stages=state.stages,
            merge_error=_merge_error([sums for _, sums in said]) if state.derived else None,
        )

    def close(self) -> None:
        """Unmap the targets' pages, which stay mapped from sync to sync."""
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
            if (now := device_of(sources)).type == "cuda" and now != self._device:
                text = f"the parameters are on {now}, and were on {self._device} when the sync was"
                raise ValueError(f"{text} connected; connect anew (nothing was written)")
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
        scratch = scratch_for(sources, derived)
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
        self, state: _Round, shadow: bool, names: tuple[str, ...] | None
    ) -> list[WeightOffer]:
        offers = []
        for number, target in enumerate(self.targets, start=self._first):
            offers.append(target.begin_update(state.version, shadow=shadow, names=names))
            state.opened.append(target)
            made = self.plan.targets[number].manifest.layout_hash
            now = offers[-1].layout_hash
            if made != now:
                text = f"made for layout {made}, the rollout offers {now}; connect anew"
                raise ValueError(f"stale plan for version {state.version}: {text}")
        return offers

    def _map(self, state: _Round, offers: Sequence[WeightOffer]) -> None:
        relayed = set[int]() if self._relay is None else self._relay.targets
        with self._current():
            for number in self._writer.targets | relayed:
                nbytes = offers[number].nbytes
                use = self._kept.use(offers[number].ticket, at_least=nbytes)
                lease = state.leases.enter_context(use)
                state.pages[number] = lease.tensor((lease.nbytes,), torch.uint8)

    def _write(self, state: _Round) -> tuple[dict[int, int], tuple[float, float]]:
        """Return the digests of what was written, by target, and `rounding`'s sums."""
        with self._current(), state.leases:
            started = time.perf_counter()
            relayed = {} if self._relay is None else self._relay.run(state.pages, state.derived)
            self._writer.start(state.pages, state.derived)
            written = {**self._writer.digests(), **relayed}
            state.copy_seconds = time.perf_counter() - started
            state.pages.clear()  # they may dangle afterwards
            return written, rounding(state.derived, self._writer.sources, self._part)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Make the shards' GPU the current one, for which pages are mapped."""
        on_gpu = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext()

    def _receipt(
        self,
        offer: WeightOffer,
        number: int,
        written: Sequence[Mapping[int, int]],
        buffers: dict[str, Tensor],
    ) -> WriteReceipt:
        """Returns what all ranks together wrote into one target."""
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


def module_sync(
    params: nn.Module | Mapping[str, Tensor], targets: Sequence[UpdatableEngine]
) -> WeightSync:
    """Make the sync of any module's parameters, FSDP2's or plain ones, with the rollouts that this
    rank speaks for; every rank calls it.

    Args:
        params: A module whose names are the checkpoint's, or `dict(module.named_parameters())` by
            checkpoint name. Parameters may change in place, move, and take other strides. Buffers
            that rollouts compute with (router biases) come with a module; a mapping may name them.
        targets: The rollouts, or handles on them.

    Raises:
        ValueError: Lists what does not fit, and names what is computed of a parameter: it would
            not follow it.
    """
    module = params
    shards = Shards(lambda: _named(module) if isinstance(module, nn.Module) else module)
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
                f"{strays[0]}: no parameter, so it would stay as it is now; pass parameters "
                "themselves, renamed at most"
            )
    return sync


def _named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | stored_buffers(module)


def places(sources: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """Return all that tables of these tensors hold: where each lies, and how it is read there."""
    return [
        (name, each.data_ptr(), each.shape, each.stride(), each.dtype, each.device)
        for name, each in sources.items()
    ]


def _merge_error(sums: Sequence[tuple[float, float]]) -> float:
    lost, moved = (sum(each) for each in zip(*sums, strict=True))
    return math.sqrt(lost / moved) if moved else 0.0


def buffer_values(sources: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return these tensors as they are now, fp32 on the CPU, by one transfer."""
    if not names:
        return {}
    chosen = {name: sources[name] for name in names}
    flat = torch.cat([each.flatten().float() for each in chosen.values()]).cpu()
    parts = flat.split([each.numel() for each in chosen.values()])
    pairs = zip(chosen.items(), parts, strict=True)
    return {name: part.reshape(each.shape).clone() for (name, each), part in pairs}


def _abort(state: _Round, error: BaseException) -> None:
    state.pages.clear()
    try:
        state.leases.close()
    except Exception as kept:  # the first failure is the one to report
        error.add_note(f"a lease was not closed: {type(kept).__name__}: {kept}")
    abort_all(state.opened, error)


def abort_all(opened: Sequence[UpdatableEngine], error: BaseException) -> None:
    """Tell the targets of a sync that failed; what cannot be told is noted on the error."""
    for target in opened:
        try:
            target.abort_update(f"{type(error).__name__}: {error}")
        # a target may be what died; the first failure is the one to report
        except Exception as deaf:
            error.add_note(f"a target could not be told: {type(deaf).__name__}: {deaf}")
