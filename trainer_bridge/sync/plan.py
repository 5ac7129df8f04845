"""Plans which elements of which shard go to which bytes of the rollout's weights. Plain data in,
plain data out: no tensors.

Both sides hold boxes of parameters; a copy is what a rank's box and a target's slice have in
common. An element that several ranks hold is copied by one on the target's own device if there is
one, so links carry as little as they can.
"""

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Self

from memsaver.ops.layout import row_major
from rollout.model import Stored, spellings
from rollout.types import Manifest, ParamSlice
from trainer_bridge.errors import listed
from trainer_bridge.sync.shards import Box, Ints, SourceShard, difference, dot, itemsize
from trainer_bridge.sync.spread import Cut, Deal, Sources, Spread, deal


@dataclass(frozen=True, kw_only=True)
class Target:
    """Weights to be written. place: of their device, named as trainer ranks name theirs."""

    manifest: Manifest
    place: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Rank `rank` casts the box of `shape` at `start` of its shard of `name` to `dtype`, into
    target number `target`.

    offset: byte of the first element, from the start of the tag's arena; strides: of the others, in
    elements. index_base: number of the first element in the digest; index_strides: of the others.
    """

    rank: int
    target: int
    name: str
    start: Ints
    shape: Ints
    dtype: str
    offset: int
    strides: Ints
    index_base: int
    index_strides: Ints

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def part(self, dim: int, first: int, size: int) -> Self:
        """Returns what is at `first` to `first + size` of dimension `dim` of the box."""
        return replace(
            self,
            start=_with(self.start, dim, self.start[dim] + first),
            shape=_with(self.shape, dim, size),
            offset=self.offset + first * self.strides[dim] * self.itemsize,
            index_base=self.index_base + first * self.index_strides[dim],
        )


def _with(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])


class _Part(NamedTuple):
    """One slice of one manifest: the targets that have it, and who sends what of it."""

    name: str
    piece: ParamSlice
    targets: Ints
    dealt: Deal


@dataclass(frozen=True, kw_only=True, eq=False)
class SyncPlan:
    """The copies of all ranks: together they write every byte of every slice of every target
    exactly once.

    layout_hash: of the targets, of all shards and of where they are; ranks with the same one have
    the same plan. nbytes: of parameters, one entry a target. link_bytes: (rank, target) -> bytes
    written to another device. parts: the slices with who sends what of them.
    """

    layout_hash: str
    targets: Sequence[Target]
    places: Sequence[str]
    nbytes: Ints
    link_bytes: dict[tuple[int, int], int]
    parts: Sequence[_Part]

    def copies(self, rank: int) -> list[Copy]:
        """Returns what one rank writes: first to its own device, then to others, target after
        target in order of bytes.

        Each rank begins with another target, so that they do not all write to the same one. The
        list is made anew by each call.
        """
        found: dict[int, list[Copy]] = defaultdict(list)
        for part in self.parts:
            for target in part.targets:
                if cuts := part.dealt.get((rank, target)):
                    found[target] += _copies(part, cuts, rank, target)
        count = len(self.targets)
        order = sorted(
            found, key=lambda t: (self.targets[t].place != self.places[rank], (t - rank) % count)
        )
        by_offset = (sorted(found[target], key=attrgetter("offset")) for target in order)
        return list(chain.from_iterable(by_offset))


class Planner:
    """Plans of one trainer's shards (of all ranks), one for each set of targets that it meets."""

    def __init__(self, shards: Iterable[SourceShard], places: Sequence[str]) -> None:
        """places: the device of every rank. A shard may be given twice: ranks just join lists."""
        self._sources = Sources(shards, places)
        self._plans: dict[object, SyncPlan] = {}

    def plan(self, targets: Sequence[Target], names: Collection[str] | None = None) -> SyncPlan:
        """names: only these parameters are written, by either side's names; None: all.

        Raises a ValueError that lists what does not fit: missing, extra or doubled names, shapes,
        parts, bytes.
        """
        layouts = tuple((target.manifest.layout_hash, target.place) for target in targets)
        chosen = None if names is None else tuple(sorted(set(names)))
        if (layouts, chosen) not in self._plans:
            text = repr((self._sources.key, layouts, chosen))
            layout_hash = hashlib.sha256(text.encode()).hexdigest()
            self._plans[layouts, chosen] = _Planning(self._sources, targets, chosen).plan(
                layout_hash
            )
        return self._plans[layouts, chosen]


class _Planning:
    """One plan in the making."""

    def __init__(
        self, sources: Sources, targets: Sequence[Target], names: Collection[str] | None
    ) -> None:
        self._sources = sources
        self._targets = targets
        self._target_places = [target.place for target in targets]
        self._names = names
        self._problems: list[str] = []
        self._deals: dict[tuple[int, Box, Ints, int], Deal] = {}
        self._parts: list[_Part] = []
        self._like: dict[str, list[int]] = defaultdict(list)  # layout hash -> targets
        for i, target in enumerate(targets):
            self._like[target.manifest.layout_hash].append(i)
        manifests = [targets[like[0]].manifest for like in self._like.values()]
        self._manifests = spelled(manifests, sources.spreads.keys())
        slices = chain.from_iterable(manifest.slices for manifest in self._manifests)
        self._anywhere = {piece.name for piece in slices}

    def plan(self, layout_hash: str) -> SyncPlan:
        slices: dict[tuple[str, Box], list[tuple[ParamSlice, str]]] = defaultdict(list)
        for manifest in self._manifests:
            for name, piece in self._named_slices(manifest):
                if self._fits(name, piece):
                    box = Box(piece.start, piece.shape)
                    slices[name, box].append((piece, manifest.layout_hash))
        if self._problems:
            rule = "the trainer's weights do not fit the rollout's, nothing was written"
            raise ValueError(f"{rule}: {listed(list(dict.fromkeys(self._problems)))}")
        kinds: Counter[tuple[int, Box, Ints]] = Counter()
        for (name, box), pieces in slices.items():
            spread = self._sources.spreads[name]
            like = (self._like[layout] for _, layout in pieces)
            targets = tuple(sorted(chain.from_iterable(like)))
            kind = (id(spread), box, targets)
            dealt = self._deal(spread, box, targets, kinds[kind] % spread.replicas)
            kinds[kind] += 1
            self._parts += [
                _Part(name, piece, tuple(self._like[layout]), dealt) for piece, layout in pieces
            ]
        return SyncPlan(
            layout_hash=layout_hash,
            targets=self._targets,
            places=self._sources.places,
            nbytes=self._nbytes(),
            link_bytes=self._link_bytes(),
            parts=self._parts,
        )

    def _named_slices(self, manifest: Manifest) -> list[tuple[str, ParamSlice]]:
        """Returns (the trainer's name, slice) of what is written; notes what does not fit."""
        stored = manifest.aliases
        wanted = None if self._names is None else {stored.get(name, name) for name in self._names}
        sources: dict[str, list[str]] = defaultdict(list)
        for name in self._sources.spreads:
            if wanted is None or stored.get(name, name) in wanted:
                sources[stored.get(name, name)].append(name)
        self._problems += name_problems(sources, manifest, self._anywhere, wanted)
        self._problems += byte_problems(manifest)
        if wanted is not None:
            known = {piece.name for piece in manifest.slices}
            known |= manifest.modules.keys() | sources.keys()
            self._problems += [f"unknown to both sides: {name}" for name in sorted(wanted - known)]
        pieces = [piece for piece in manifest.slices if math.prod(piece.shape)]
        return [
            (sources[piece.name][0], piece)
            for piece in pieces
            if len(sources.get(piece.name, [])) == 1
        ]

    def _fits(self, name: str, piece: ParamSlice) -> bool:
        spread = self._sources.spreads[name]
        problem = spread.problem
        if problem is None and spread.shape != piece.global_shape:
            problem = f"shape {spread.shape} in the trainer, {piece.global_shape} in the rollout"
        if problem is None and (at := spread.gap(Box(piece.start, piece.shape))) is not None:
            problem = f"element {at} is held by no rank"
        if problem is not None:
            self._problems.append(f"{piece.name}: {problem}")
        return problem is None

    def _deal(self, spread: Spread, box: Box, targets: Ints, turn: int) -> Deal:
        key = (id(spread), box, targets, turn)
        if key not in self._deals:
            self._deals[key] = deal(
                spread.cuts(box), targets, self._target_places, self._sources.places, turn
            )
        return self._deals[key]

    def _nbytes(self) -> Ints:
        nbytes = [0] * len(self._targets)
        for part in self._parts:
            size = math.prod(part.piece.shape) * itemsize(part.piece.dtype)
            for target in part.targets:
                nbytes[target] += size
        return tuple(nbytes)

    def _link_bytes(self) -> dict[tuple[int, int], int]:
        """Each deal is looked at once for all layers that share it."""
        times: Counter[tuple[int, Ints, int]] = Counter()
        dealt = {id(part.dealt): part.dealt for part in self._parts}
        for part in self._parts:
            times[id(part.dealt), part.targets, itemsize(part.piece.dtype)] += 1
        places, found = self._sources.places, Counter[tuple[int, int]]()
        for (which, targets, size), count in times.items():
            among = set(targets)
            for (rank, target), cuts in dealt[which].items():
                if target in among and places[rank] != self._target_places[target]:
                    found[rank, target] += sum(cut.volume for cut in cuts) * size * count
        return dict(found)


def _copies(part: _Part, cuts: Sequence[Cut], rank: int, target: int) -> list[Copy]:
    piece = part.piece
    strides, size = piece.strides or row_major(piece.shape), itemsize(piece.dtype)
    index_strides = row_major(piece.global_shape)
    return [
        Copy(
            rank=rank,
            target=target,
            name=part.name,
            start=cut.source,
            shape=cut.shape,
            dtype=piece.dtype,
            offset=piece.offset + dot(cut.at, strides) * size,
            strides=strides,
            index_base=piece.index_base + cut.number,
            index_strides=index_strides,
        )
        for cut in cuts
    ]


def name_problems(
    sources: dict[str, list[str]],
    manifest: Manifest,
    anywhere: Collection[str],
    wanted: Collection[str] | None,
) -> list[str]:
    """sources: stored name -> the trainer's names for it. anywhere: what any target stores. wanted:
    stored names, or None: all.
    """
    stored = {piece.name for piece in manifest.slices if wanted is None or piece.name in wanted}
    # A module alone: all of it is padding on this rank.
    known = stored | (manifest.modules.keys() & anywhere)
    problems = [f"missing in the trainer: {name}" for name in sorted(stored - sources.keys())]
    problems += [
        f"unknown to the rollout: {', '.join(sources[name])}"
        for name in sorted(sources.keys() - known)
    ]
    for _, several in sorted(sources.items()):
        if len(several) > 1:
            text = "are one parameter in the rollout (tied), not in the trainer"
            problems.append(f"{' and '.join(sorted(several))} {text}")
    return problems


def byte_problems(manifest: Manifest) -> list[str]:
    """Lists slices that overlap, end too late or are not aligned."""
    problems: list[str] = []
    pieces = [piece for piece in manifest.slices if math.prod(piece.shape)]
    cluster: list[ParamSlice] = []  # slices whose byte ranges touch each other
    last, checked = 0, set[object]()
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset % itemsize(piece.dtype):
            problems.append(f"{piece.name}: byte {piece.offset} is not aligned to {piece.dtype}")
        if (end := piece.offset + _extent(piece)) > manifest.nbytes:
            problems.append(
                f"{piece.name} ends at byte {end}, after the manifest's {manifest.nbytes}"
            )
        if piece.offset >= last:
            problems += _overlaps(cluster, checked)
            cluster = []
        cluster.append(piece)
        last = max(last, end)
    return problems + _overlaps(cluster, checked)


def _strides(piece: ParamSlice) -> Ints:
    return piece.strides or row_major(piece.shape)


def _extent(piece: ParamSlice) -> int:
    """Counts the bytes from the first element to the end of the last one."""
    return (dot([size - 1 for size in piece.shape], _strides(piece)) + 1) * itemsize(piece.dtype)


def _overlaps(cluster: Sequence[ParamSlice], checked: set[object]) -> list[str]:
    """Slices may interleave, but not share bytes. checked: clusters without problems."""
    if len(cluster) == 1 and cluster[0].strides is None:
        return []
    key = tuple(
        (piece.offset - cluster[0].offset, piece.shape, piece.strides, piece.dtype)
        for piece in cluster
    )
    if key in checked:
        return []
    runs = sorted(itertools.chain.from_iterable(map(_runs, cluster)))
    for (_, end, name), (start, _, other) in itertools.pairwise(runs):
        if start < end:
            return [f"{name} and {other} overlap at byte {start}"]
    checked.add(key)
    return []


def _runs(piece: ParamSlice) -> Iterable[tuple[int, int, str]]:
    """Yields (first byte, end, name) of the ranges of bytes that a slice consists of."""
    size, strides = itemsize(piece.dtype), _strides(piece)
    outer, width = len(piece.shape), 1
    while outer > 0 and strides[outer - 1] == width:
        outer -= 1
        width *= piece.shape[outer]
    for at in itertools.product(*map(range, piece.shape[:outer])):
        first = piece.offset + dot(at, strides) * size
        yield first, first + width * size, piece.name


def spelled(manifests: Iterable[Manifest], names: Collection[str]) -> list[Manifest]:
    """Returns the manifests as they are, but for parameters that `names` holds otherwise spelled:
    of each part there is a slice of its own under its name, one of no rows where the target does
    not hold it.
    """
    manifests, ways = list(manifests), dict[str, list[Stored]]()
    for piece in chain.from_iterable(manifest.slices for manifest in manifests):
        if piece.name not in names and piece.name not in ways:
            for way in spellings(piece.name, piece.global_shape):
                if any(stored.name in names for stored in way):
                    ways[piece.name] = way
    return [_cut(manifest, ways) for manifest in manifests] if ways else manifests


def _cut(manifest: Manifest, ways: Mapping[str, Sequence[Stored]]) -> Manifest:
    held: dict[str, list[ParamSlice]] = defaultdict(list)
    for piece in manifest.slices:
        held[piece.name].append(piece)
    slices = [piece for piece in manifest.slices if piece.name not in ways]
    for name in ways.keys() & (held.keys() | manifest.modules.keys()):
        for stored in ways[name]:
            parts = [part for piece in held[name] if (part := _part(piece, stored)) is not None]
            slices += parts or [_nothing(stored)]
    return replace(manifest, slices=tuple(slices))


def _part(piece: ParamSlice, stored: Stored) -> ParamSlice | None:
    """Returns what the slice has of a part; None: nothing."""
    common = Box(piece.start, piece.shape).intersect(Box(stored.start, stored.box))
    if common is None:
        return None
    strides, last = piece.strides or row_major(piece.shape), -len(stored.shape)
    within = difference(common.start, piece.start)
    return replace(
        piece,
        name=stored.name,
        offset=piece.offset + dot(within, strides) * itemsize(piece.dtype),
        shape=common.shape[last:],
        global_shape=stored.shape,
        start=difference(common.start, stored.start)[last:],
        index_base=piece.index_base + dot(stored.start, row_major(piece.global_shape)),
        strides=strides[last:],
    )


def _nothing(stored: Stored) -> ParamSlice:
    return ParamSlice(
        name=stored.name,
        offset=0,
        shape=(0, *stored.shape[1:]),
        dtype="float32",
        global_shape=stored.shape,
        start=(0,) * len(stored.shape),
        index_base=0,
    )
