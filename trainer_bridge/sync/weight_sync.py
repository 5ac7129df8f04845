"""One weight sync over all ranks: prepare, open, write, verify, commit, or nothing that anybody
serves.

    prepare  finite? newer? the shards where they were?  nothing is touched yet
    open     every target offers its pages               without shadow pages: undefined from now on
    map      every rank maps the pages it writes into    from here on ranks may wait for each other
    write    every rank writes its copies                both sides know digests
    verify   every target reads its pages back           digests are the same, or the sync ends
    commit   every target serves the version             only now may the trainer give up its shards

Bytes for targets whose pages a rank cannot map go by way of others (`connection.py`, `relay.py`).

After each stage all ranks agree (`consensus.py`), so each knows that the others succeeded before it
begins the next. A stage that fails anywhere ends the sync everywhere: targets with shadow pages
serve their old version, others none.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import memsaver
from rollout.protocols import UpdatableEngine
from rollout.types import VerifyReceipt, WeightLayout, WeightOffer, WriteReceipt
from trainer_bridge.errors import listed
from trainer_bridge.sync.agree import Alone, Consensus
from trainer_bridge.sync.cast_copy import OnPart, all_finite
from trainer_bridge.sync.connection import IpcTicket, connect, obstacles
from trainer_bridge.sync.plan import Planner, SyncPlan, Target
from trainer_bridge.sync.relay import MESSAGE_BYTES, Relay
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.writer import LowRank, RankCopies, Written

T = TypeVar("T")
_MASK64 = (1 << 64) - 1
_log = logging.getLogger("memsaver")


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
    nbytes: int
    link_bytes: int
    seconds: float
    copy_seconds: float
    verify_seconds: float
    stages: dict[str, float]
    merge_error: float | None = None

    @property
    def lossy(self) -> bool:
        """Return whether so much of the adapters was lost that the rollout lags behind them."""
        return self.merge_error is not None and self.merge_error > 0.1


@dataclass
class _Round:
    """One sync under way. opened: targets that are to be told if it fails."""

    version: int
    opened: list[UpdatableEngine] = field(default_factory=list)
    copies: RankCopies | None = None
    relay: Relay | None = None
    leases: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pages: dict[int, Tensor] = field(default_factory=dict)
    derived: Mapping[str, LowRank] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    copy_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


class _Joined(NamedTuple):
    """Holds what a rank brings along."""

    place: str
    shards: Sequence[SourceShard]
    layouts: Sequence[WeightLayout]


class WeightSync:
    """Writes shards of all ranks into the pages of all targets, version by version; plans and
    tables are made once.

    All ranks make it, and call `sync`, together. Targets are the engines, or handles on them, that
    this rank speaks for: each is one rank's, and in the order of the ranks they are the plan's
    targets 0, 1, ...
    """

    def __init__(
        self,
        shards: Sequence[SourceShard],
        sources: Callable[[], Mapping[str, Tensor]],
        targets: Sequence[UpdatableEngine],
        consensus: Consensus | None = None,
        *,
        place: str,
        derived: Callable[[], Mapping[str, LowRank]] = dict,
        transport: str = "auto",
        group: dist.ProcessGroup | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """shards: this rank's, and its copy of the buffers that the targets compute with. sources:
        this rank's, by name, asked for with every sync; they may move, and change strides and
        dtype. place: of this rank's device, as in `WeightLayout`. derived: asked for with every
        sync, the parameters that are written as a function of this rank's shard of them.

        transport: "auto" writes into mapped pages wherever a rank can map them, and falls back
        where it can't, with a warning and an entry in `transports`; or "pages", "relay", "handle"
        alone. group: of the ranks, for what goes from one to another, in messages of at most
        `message_bytes`. A ValueError lists what does not fit; nothing has been touched then.
        """
        self._consensus = consensus or Alone()
        self._targets = tuple(targets)
        self._shards = tuple(shards)
        self._sources = sources
        self._derived = derived
        self._version: int | None = None
        brought = self._consensus.agree(
            "connect", lambda: (place, list(shards), [t.weight_layout() for t in targets])
        )
        said = [_Joined(*each) for each in brought]
        self._first = sum(len(each.layouts) for each in said[: self._consensus.rank])
        blocked = self._consensus.agree("plan", lambda: self._make_plan(said, place))
        self._message_bytes = message_bytes
        self._connection = connect(
            self.plan,
            list(chain.from_iterable([rank] * len(each.layouts) for rank, each in enumerate(said))),
            blocked,
            mode=transport,
            rank=self._consensus.rank,
            device=next((source.device for source in sources().values()), torch.device("cpu")),
            group=group,
            message_bytes=message_bytes,
        )
        self.transports = self._connection.transports
        self._kept = memsaver.LeaseCache()
        self._warned = False
        self._made_for: object = None  # the last kind of sync, and where its sources were
        self._copies: tuple[RankCopies, Relay | None]
        if self._consensus.rank == 0 and self._withheld:
            _log.warning("%s; only the first sync is served with these values", self._unsynced())

    def _make_plan(self, said: Sequence[_Joined], place: str) -> dict[int, str]:
        """Makes the plan, the same on all ranks; returns what this one cannot map."""
        shards = chain.from_iterable(rank.shards for rank in said)
        layouts = list(chain.from_iterable(rank.layouts for rank in said))
        known = dict(chain.from_iterable(each.buffers.items() for each in layouts))
        params, buffers = list[SourceShard](), dict[str, SourceShard]()
        for shard in shards:
            if shard.name not in known:
                params.append(shard)
            elif shard.shape != known[shard.name]:
                theirs = f"{known[shard.name]} in the rollout; keep it whole on every rank"
                text = f"shape {shard.shape} on rank {shard.rank}, {theirs}"
                raise ValueError(f"{shard.name}: {text}")
            else:
                buffers[shard.name] = shard
        self.buffers = sorted(buffers)
        self._withheld = sorted(known.keys() - buffers)
        self._planned = [Target(manifest=each.manifest, place=each.place) for each in layouts]
        self._planner = Planner(params, [rank.place for rank in said])
        self.plan = self._planner.plan(self._planned)
        return obstacles(place, self.plan)

    def holds(self) -> bool:
        """Tells whether all targets serve what the last sync wrote. All ranks ask."""
        said = self._consensus.agree(
            "ask", lambda: {self._version, *(t.served_version() for t in self._targets)}
        )
        versions = set[int | None]().union(*said)
        return len(versions) == 1 and None not in versions

    def sync(
        self,
        version: int,
        *,
        shadow: bool = False,
        names: Collection[str] | None = None,
        check_finite: bool = False,
        on_part: OnPart | None = None,
    ) -> SyncReceipt:
        """Write the shards as they are now, verify them on both sides, and have every target serve
        them as `version`.

        shadow: targets take pages for a second copy, and serve their old version until the commit.
        names: write these parameters only, by either side's names, over weights that are defined
        (`LowRank`, after a whole sync). check_finite: refuse NaN and infinity in shards, at the
        cost of reading them twice. Raises what went wrong here, or a `SyncError` that names the
        stage, the rank and its error.
        """
        started, state = time.perf_counter(), _Round(version)
        chosen = None if names is None else tuple(sorted(names))
        self._agree(state, "prepare", lambda: self._prepare(state, chosen, check_finite))
        try:
            offered = self._agree(state, "open", lambda: self._open(state, shadow, chosen))
            offers = list(chain.from_iterable(offered))
            self._agree(state, "map", lambda: self._map(state, offers))
            said = self._agree(state, "write", lambda: self._write(state, on_part))
            written = [each for each, _ in said]
            receipts = [
                self._receipt(offer, number, written, state.buffers)
                for number, offer in enumerate(offers)
            ]
            verified = self._agree(state, "verify", lambda: self._verify(receipts))
            self._agree(
                state, "commit", lambda: [target.commit_update(version) for target in self._targets]
            )
        except BaseException as error:
            _abort(state, error)
            raise
        self._version = version
        results = chain.from_iterable(rank.values() for rank in written)
        checks = chain.from_iterable(verified)
        made = SyncReceipt(
            version=version,
            digests=tuple(receipt.digest for receipt in receipts),
            nbytes=sum(receipt.nbytes for receipt in receipts),
            link_bytes=sum(each.link_bytes for each in results),
            seconds=time.perf_counter() - started,
            copy_seconds=state.copy_seconds,
            verify_seconds=max((each.seconds for each in checks), default=0.0),
            stages=state.stages,
            merge_error=_merge_error([sums for _, sums in said]) if state.derived else None,
        )
        if made.lossy and not self._warned and self._consensus.rank == 0:
            self._warned = True
            _log.warning(
                "version %d: rounding took %.0f %% of what the adapters add to the weights, so the "
                "rollout lags behind the policy; this falls as adapters grow, and where it stays "
                "raise the learning rate, or serve float32 weights",
                version,
                100 * (made.merge_error or 0),
            )
        return made

    def close(self) -> None:
        """Unmap the targets' pages, which stay mapped from sync to sync."""
        self._kept.close()

    def _agree(self, state: _Round, stage: str, step: Callable[[], T]) -> list[T]:
        started = time.perf_counter()
        answers = self._consensus.agree(stage, step)
        state.stages[stage] = time.perf_counter() - started
        return answers

    def _prepare(self, state: _Round, names: tuple[str, ...] | None, check_finite: bool) -> None:
        if self._version is not None and state.version < self._version:
            text = f"version {state.version} is stale: version {self._version} has been written"
            raise ValueError(f"{text}; use a higher one")
        if self._withheld and self._version not in (None, state.version):
            text = "only the first sync could be served with the values of its files"
            raise ValueError(f"{self._unsynced()}; {text} (nothing was written)")
        sources, state.derived = self._sources(), self._derived()
        wanted = names, frozenset(state.derived), places(sources)
        if wanted != self._made_for:
            self._made_for, device = None, self._connection.device
            away = {each.device for each in sources.values() if each.is_cuda} - {device}
            if away:
                text = f"the parameters are on {away.pop()}, and were on {device} when the sync was"
                raise ValueError(f"{text} connected; connect anew (nothing was written)")
            plan = self._planner.plan(self._planned, names)
            self._copies = self._tables(plan, sources, state.derived)
            self._made_for = wanted
        state.copies, state.relay = self._copies
        state.copies.check(state.derived, check_finite)
        state.buffers = buffer_values(sources, self.buffers)
        if check_finite and (bad := [n for n, b in state.buffers.items() if not all_finite(b)]):
            text = f"{listed(bad)} has NaN or infinite values"
            raise ValueError(f"the weights are refused, nothing was written: {text}")

    def _unsynced(self) -> str:
        more = f" and {len(self._withheld) - 1} more" if len(self._withheld) > 1 else ""
        return (
            f"the rollout computes with {self._withheld[0]}{more}, which is not synced; pass "
            "module_sync the module itself, or this buffer among the parameters"
        )

    def _tables(
        self, plan: SyncPlan, sources: Mapping[str, Tensor], derived: Collection[str]
    ) -> tuple[RankCopies, Relay | None]:
        rank, routes = self._consensus.rank, self._connection.routes
        direct = routes.direct(rank) if routes.indirect else None
        copies = RankCopies(plan, self._shards, sources, rank=rank, derived=derived, targets=direct)
        if not routes.indirect:
            return copies, None
        relay = Relay(
            plan,
            self._connection,
            sources,
            dict(enumerate(self._targets, start=self._first)),
            rank=rank,
            derived=derived,
            message_bytes=self._message_bytes,
        )
        return copies, relay

    def _open(
        self, state: _Round, shadow: bool, names: tuple[str, ...] | None
    ) -> list[WeightOffer]:
        offers = []
        for number, target in enumerate(self._targets, start=self._first):
            offers.append(target.begin_update(state.version, shadow=shadow, names=names))
            state.opened.append(target)
            made = self.plan.targets[number].manifest.layout_hash
            now = offers[-1].manifest.layout_hash
            if made != now:
                text = f"made for layout {made}, the rollout offers {now}; connect anew"
                raise ValueError(f"stale plan for version {state.version}: {text}")
        return offers

    def _map(self, state: _Round, offers: Sequence[WeightOffer]) -> None:
        assert state.copies is not None
        relayed = [] if state.relay is None else state.relay.targets
        with _current(state.copies.sources):
            for number in {*state.copies.targets, *relayed}:
                state.pages[number] = mapped(offers[number], self._kept, state.leases)

    def _write(
        self, state: _Round, on_part: OnPart | None
    ) -> tuple[dict[int, Written], tuple[float, float]]:
        copies = state.copies
        assert copies is not None
        with _current(copies.sources), state.leases:
            started = time.perf_counter()
            relayed = {} if state.relay is None else state.relay.run(state.pages, state.derived)
            written = copies.write(state.pages, state.derived, on_part) | relayed
            state.copy_seconds = time.perf_counter() - started
            state.pages.clear()  # they may dangle afterwards
            return written, copies.rounding(state.derived)

    def _receipt(
        self,
        offer: WeightOffer,
        number: int,
        written: Sequence[Mapping[int, Written]],
        buffers: dict[str, Tensor],
    ) -> WriteReceipt:
        """Returns what all ranks together wrote into one target."""
        parts = [each[number] for each in written if number in each]
        return WriteReceipt(
            version=offer.version,
            layout_hash=offer.manifest.layout_hash,
            digest=sum(part.digest for part in parts) & _MASK64,
            nbytes=sum(part.nbytes for part in parts),
            buffers=buffers,
        )

    def _verify(self, receipts: Sequence[WriteReceipt]) -> list[VerifyReceipt]:
        return [
            target.verify_update(receipts[number])
            for number, target in enumerate(self._targets, start=self._first)
        ]


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


def mapped(offer: WeightOffer, kept: memsaver.LeaseCache, uses: contextlib.ExitStack) -> Tensor:
    """Maps all bytes of the offered pages, uint8, for as long as the uses last."""
    if isinstance(offer.ticket, IpcTicket):
        pages = offer.ticket.map()
    else:
        try:
            lease = uses.enter_context(kept.use(offer.ticket, at_least=offer.manifest.nbytes))
        except memsaver.LeaseError as error:
            raise memsaver.LeaseError(
                f"{error} (where pages cannot be mapped at all, connect with transport='handle')"
            ) from error
        pages = lease.tensor((lease.nbytes,), torch.uint8)
    if pages.nbytes < offer.manifest.nbytes:
        described = f"its manifest describes {offer.manifest.nbytes}"
        text = f"the rollout shares {pages.nbytes} bytes, {described}"
        raise ValueError(f"{text}; offer all of tag weights")
    return pages


def _current(shards: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[object]:
    """Makes the shards' GPU the current one, for which pages are mapped."""
    shard = next(iter(shards.values()), None)
    if shard is None or not shard.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.device(shard.device)


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
