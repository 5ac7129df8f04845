"""SyncPlan which elements of which shard go to which bytes of the rollout's weights. Plain data in,
plain data out: no tensors.

Both sides hold boxes of parameters; a copy is what a rank's box and a target's slice have in
common. An element that several ranks hold is copied by one on the target's own device if there is
one, so links carry as little as they can.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Self

from memsaver.ops.layout import row_major
from memsaver.ops.rows import Rows, box_rows, dot
from rollout.model import Stored, spellings
from rollout.weights import Manifest, ParamSlice, WeightLayout
from trainer_bridge.errors import listed
from trainer_bridge.sync.shards import (
    Box,
    Held,
    Ints,
    SourceShard,
    cover,
    difference,
    holders,
    itemsize,
    torch_dtype,
)


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
        """Return what is at `first` to `first + size` of dimension `dim` of the box."""
        return replace(
            self,
            start=_with(self.start, dim, self.start[dim] + first),
            shape=_with(self.shape, dim, size),
            offset=self.offset + first * self.strides[dim] * self.itemsize,
            index_base=self.index_base + first * self.index_strides[dim],
        )


def _with(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])


Sends = Mapping[tuple[int, int], Sequence[tuple[Box, Box]]]
"""Who sends what of one slice: (rank, target) -> (box that is sent, box that the rank holds)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SyncPlan:
    """The copies of all ranks: together they write every byte of every slice of every target
    exactly once.

    slices: (the trainer's name, slice, targets that have it, who sends what of it to
    them). traffic: (rank, target) -> bytes that are written.
    """

    targets: Sequence[WeightLayout]
    places: Sequence[str]
    slices: Sequence[tuple[str, ParamSlice, Ints, Sends]]
    traffic: Mapping[tuple[int, int], int]

    @property
    def nbytes(self) -> Ints:
        """Return the bytes of parameters, one entry a target."""
        nbytes = [0] * len(self.targets)
        for (_, target), size in self.traffic.items():
            nbytes[target] += size
        return tuple(nbytes)

    @property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Return the traffic from one device to another."""
        return {
            (rank, target): size
            for (rank, target), size in self.traffic.items()
            if self.places[rank] != self.targets[target].place
        }

    def copies(self, rank: int) -> list[Copy]:
        """Return what one rank writes: first to its own device, then to others, target after target
        in order of bytes.

        Each rank begins with another target, so that they do not all write to the same one. Each
        call makes a new list.
        """
        found: dict[int, list[Copy]] = defaultdict(list)
        for name, piece, targets, sends in self.slices:
            for target in targets:
                for sent, held in sends.get((rank, target), ()):
                    found[target].append(_copy(name, piece, sent, held, rank, target))
        count = len(self.targets)
        order = sorted(
            found, key=lambda t: (self.targets[t].place != self.places[rank], (t - rank) % count)
        )
        by_offset = (sorted(found[target], key=attrgetter("offset")) for target in order)
        return list(chain.from_iterable(by_offset))


def _copy(name: str, piece: ParamSlice, sent: Box, held: Box, rank: int, target: int) -> Copy:
    strides, numbers = _strides(piece), row_major(piece.global_shape)
    within = difference(sent.start, piece.start)
    return Copy(
        rank=rank,
        target=target,
        name=name,
        start=difference(sent.start, held.start),
        shape=sent.shape,
        dtype=piece.dtype,
        offset=piece.offset + dot(within, strides) * itemsize(piece.dtype),
        strides=strides,
        index_base=piece.index_base + dot(sent.start, numbers),
        index_strides=numbers,
    )


class Planner:
    """Plans of one trainer's shards (of all ranks), one for each set of targets that it meets.

    The layers of a model repeat each other: what is worked out here is worked out once for a kind
    of parameter.
    """

    def __init__(self, shards: Iterable[SourceShard], places: Sequence[str]) -> None:
        """Take the shards of all ranks.

        Args:
            shards: A shard may be given twice: ranks just join lists.
            places: The device of every rank.

        Raises:
            ValueError: A rank that holds shards has no place.
        """
        parts: dict[str, set[SourceShard]] = defaultdict(set)
        for shard in shards:
            parts[shard.name].add(replace(shard, name="", dtype=""))
        ranks = {shard.rank for shard in chain.from_iterable(parts.values())}
        if missing := {rank for rank in ranks if not 0 <= rank < len(places)}:
            text = f"ranks {sorted(missing)} hold shards, but places lists {len(places)}"
            raise ValueError(f"{text}; one a rank is needed")
        self._places = tuple(places)
        # (shape, who holds what, or what is wrong) of each parameter
        self._parameters: dict[str, tuple[Ints, Held, str]] = {}
        kinds: dict[frozenset[SourceShard], tuple[Held, str]] = {}
        for name in sorted(parts):
            kind = frozenset(parts[name])
            if kind not in kinds:
                kinds[kind] = _held(kind)
            self._parameters[name] = next(iter(kind)).global_shape, *kinds[kind]
        self._plans: dict[object, SyncPlan] = {}

    def plan(
        self, targets: Sequence[WeightLayout], names: Collection[str] | None = None
    ) -> SyncPlan:
        """Return the plan for these targets, made once.

        Args:
            targets: What is written.
            names: Only these parameters are written, by either side's names; None: all.

        Raises:
            ValueError: Lists what does not fit: missing, extra or doubled names, shapes, parts,
                bytes.
        """
        layouts = tuple((target.manifest.layout_hash, target.place) for target in targets)
        chosen = None if names is None else tuple(sorted(set(names)))
        if (layouts, chosen) not in self._plans:
            self._plans[layouts, chosen] = self._make(targets, chosen)
        return self._plans[layouts, chosen]

    def _make(self, targets: Sequence[WeightLayout], names: Sequence[str] | None) -> SyncPlan:
        alike: dict[str, list[int]] = defaultdict(list)  # layout hash -> targets
        for number, target in enumerate(targets):
            alike[target.manifest.layout_hash].append(number)
        manifests = [targets[numbers[0]].manifest for numbers in alike.values()]
        places = [target.place for target in targets]
        turns: Counter[object] = Counter()
        made: dict[object, Sends] = {}
        uses: Counter[tuple[object, int]] = Counter()  # (key of `made`, bytes of an element)
        slices: list[tuple[str, ParamSlice, Ints, Sends]] = []
        for name, piece, layout in self._fitting(spelled(manifests, self._parameters), names):
            held, numbers = self._parameters[name][1], tuple(alike[layout])
            box = Box(piece.start, piece.shape)
            kind = id(held), box, numbers
            turn = turns[kind] % max(len(ranks) for _, ranks in held)
            turns[kind] += 1
            key = kind, turn
            if key not in made:
                made[key] = self._sends(box, held, numbers, places, turn)
            uses[key, itemsize(piece.dtype)] += 1
            slices.append((name, piece, numbers, made[key]))
        return SyncPlan(
            targets=targets, places=self._places, slices=slices, traffic=_traffic(made, uses)
        )

    def _fitting(
        self, manifests: Sequence[Manifest], names: Collection[str] | None
    ) -> list[tuple[str, ParamSlice, str]]:
        """Return (the trainer's name, slice, hash of its layout) of what is written. A ValueError
        lists what does not fit.
        """
        slices = chain.from_iterable(manifest.slices for manifest in manifests)
        anywhere = {piece.name for piece in slices}
        fitting: list[tuple[str, ParamSlice, str]] = []
        problems: list[str] = []
        for manifest in manifests:
            sources, wanted = self._by_stored_name(manifest, names)
            problems += name_problems(sources, manifest, anywhere, wanted)
            problems += byte_problems(manifest)
            for piece in manifest.slices:
                theirs = sources.get(piece.name, ())
                if len(theirs) != 1 or not math.prod(piece.shape):
                    continue
                if problem := self._misfit(theirs[0], piece):
                    problems.append(f"{piece.name}: {problem}")
                fitting.append((theirs[0], piece, manifest.layout_hash))
        if problems:
            rule = "the trainer's weights do not fit the rollout's, nothing was written"
            raise ValueError(f"{rule}: {listed(list(dict.fromkeys(problems)))}")
        return fitting

    def _by_stored_name(
        self, manifest: Manifest, names: Collection[str] | None
    ) -> tuple[dict[str, list[str]], set[str] | None]:
        """Return stored name -> the trainer's names for it, of what is written; and the stored
        names that are wanted, None: all.
        """
        stored = manifest.aliases
        wanted = None if names is None else {stored.get(name, name) for name in names}
        sources: dict[str, list[str]] = defaultdict(list)
        for name in self._parameters:
            if wanted is None or stored.get(name, name) in wanted:
                sources[stored.get(name, name)].append(name)
        return sources, wanted

    def _misfit(self, name: str, piece: ParamSlice) -> str | None:
        shape, held, problem = self._parameters[name]
        if problem:
            return problem
        if shape != piece.global_shape:
            return f"shape {shape} in the trainer, {piece.global_shape} in the rollout"
        box = Box(piece.start, piece.shape)
        lacking = box.volume - sum(common.volume for common, _, _ in cover(box, held))
        return f"{lacking} of {box.volume} elements are held by no rank" if lacking else None

    def _sends(
        self, box: Box, held: Held, targets: Ints, target_places: Sequence[str], turn: int
    ) -> Sends:
        """Choose one holder of each part of the box for each of `targets`: one on the target's
        device, else holders in turn.

        turn: differs between parameters that are sent alike, so that what does not divide evenly
        does not always fall to the same rank.
        """
        sends: dict[tuple[int, int], list[tuple[Box, Box]]] = defaultdict(list)
        for common, whole, ranks in cover(box, held):
            turns: Counter[Ints] = Counter()
            for target in targets:
                near = (rank for rank in ranks if self._places[rank] == target_places[target])
                choice = tuple(near) or ranks
                rank = choice[(turn + turns[choice]) % len(choice)]
                turns[choice] += 1
                sends[rank, target].append((common, whole))
        return dict(sends)


def _traffic(
    made: Mapping[object, Sends], uses: Mapping[tuple[object, int], int]
) -> dict[tuple[int, int], int]:
    traffic: Counter[tuple[int, int]] = Counter()
    for (key, size), count in uses.items():
        for pair, boxes in made[key].items():
            traffic[pair] += sum(sent.volume for sent, _ in boxes) * size * count
    return traffic


def _held(kind: Iterable[SourceShard]) -> tuple[Held, str]:
    """Return the holders, or none and what is wrong."""
    try:
        return holders(kind), ""
    except ValueError as problem:
        return (), str(problem)


def name_problems(
    sources: Mapping[str, Sequence[str]],
    manifest: Manifest,
    anywhere: Collection[str],
    wanted: Collection[str] | None,
) -> list[str]:
    """List names that only one side has, or the trainer twice.

    Args:
        sources: Stored name -> the trainer's names for it.
        manifest: Of one target.
        anywhere: Names that any target stores.
        wanted: Stored names; None: all.
    """
    everything = {piece.name for piece in manifest.slices}
    stored = everything if wanted is None else everything & set(wanted)
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
    unknown = set(wanted or ()) - everything - manifest.modules.keys() - sources.keys()
    return problems + [f"unknown to both sides: {name}" for name in sorted(unknown)]


def byte_problems(manifest: Manifest) -> list[str]:
    """List slices that overlap, end too late or are not aligned."""
    problems: list[str] = []
    pieces = [piece for piece in manifest.slices if math.prod(piece.shape)]
    cluster: list[ParamSlice] = []  # slices whose byte ranges touch each other
    last, checked = 0, set[object]()
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset % itemsize(piece.dtype):
            problems.append(f"{piece.name}: byte {piece.offset} is not aligned to {piece.dtype}")
        if (end := _rows(piece).end) > manifest.nbytes:
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


def _rows(piece: ParamSlice) -> Rows:
    strides, dtype = _strides(piece), torch_dtype(piece.dtype)
    return box_rows(
        piece.shape, dtype, offset=piece.offset, strides=strides, index=0, index_strides=strides
    )


def _overlaps(cluster: Sequence[ParamSlice], checked: set[object]) -> list[str]:
    """List slices that share bytes; they may interleave. checked: clusters without problems."""
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
    """Yield (first byte, end, name) of the ranges of bytes that a slice consists of."""
    size = itemsize(piece.dtype)
    for row in _rows(piece).table:
        for number in range(row.rows):
            start = row.target + number * row.target_pitch * size
            yield start, start + row.width * size, piece.name


def spelled(manifests: Iterable[Manifest], names: Collection[str]) -> list[Manifest]:
    """Return the manifests as they are, but for parameters that `names` holds otherwise spelled:
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
    """Return what the slice has of a part; None: nothing."""
    common = Box(piece.start, piece.shape).intersect(Box(stored.start, stored.box))
    if common is None:
        return None
    strides, last = _strides(piece), -len(stored.shape)
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
