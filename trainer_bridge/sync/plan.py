"""The plan of a sync: which elements of a shard go to which bytes of a rollout's weights.

Input and output are plain data, without tensors. Both sides hold boxes of parameters, and a copy is
the intersection of a rank's box and a target's slice. If several ranks hold an element, a rank on
the target's device copies it if there is one, or else a rank on the target's machine, to keep
traffic on links low.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Self

from memsaver.ops.layout import row_major
from memsaver.ops.rows import dot
from memsaver.system.devices import machine_of
from rollout.model import Stored, spellings
from rollout.weights import ArenaBox, Manifest, ParamSlice, WeightLayout
from trainer_bridge.errors import listed
from trainer_bridge.sync.shards import Box, Held, Ints, SourceShard, cover, difference, held_boxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy(ArenaBox):
    """A box that one rank casts from its shard into the arena of a target."""

    rank: int  # the sender
    target: int  # number of the target
    name: str  # the trainer's name of the parameter
    start: Ints  # first element of the box in the rank's shard
    index_base: int  # number of the first element in the digest
    index_strides: Ints  # distances between the elements' numbers in the digest, per dimension

    def part(self, dim: int, first: int, size: int) -> Self:
        """Return the copy of indices `first` to `first + size` of dimension `dim`."""
        return replace(
            self,
            start=_with(self.start, dim, self.start[dim] + first),
            shape=_with(self.shape, dim, size),
            offset=self.offset + first * self.strides[dim] * self.torch_dtype.itemsize,
            index_base=self.index_base + first * self.index_strides[dim],
        )


def _with(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])


Sends = Mapping[tuple[int, int], Sequence[tuple[Box, Box]]]
"""Senders of one slice: (rank, target) -> pairs of the sent box and the rank's whole box."""


class Planned(NamedTuple):
    """A slice of some targets, and the ranks that send it."""

    name: str  # the trainer's name of the parameter
    piece: ParamSlice
    targets: Ints  # numbers of the targets that have the slice
    sends: Sends  # one object for all slices with the same senders and boxes


@dataclass(frozen=True, kw_only=True, eq=False)
class SyncPlan:
    """The copies of all ranks, which write every byte of every slice exactly once."""

    targets: Sequence[WeightLayout]
    places: Sequence[str]  # device of each rank
    slices: Sequence[Planned]  # of all targets

    def only(self, names: Collection[str]) -> Self:
        """Return the plan for parameters `names` alone, by the trainer's names."""
        return replace(self, slices=[planned for planned in self.slices if planned.name in names])

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Return the bytes that each rank writes into each target, by (rank, target)."""
        sends = {id(planned.sends): planned.sends for planned in self.slices}
        uses = Counter((id(p.sends), p.piece.torch_dtype.itemsize) for p in self.slices)
        traffic: Counter[tuple[int, int]] = Counter()
        for (key, size), count in uses.items():
            for pair, boxes in sends[key].items():
                traffic[pair] += sum(sent.volume for sent, _ in boxes) * size * count
        return dict(traffic)

    @cached_property
    def nbytes(self) -> Ints:
        """Return the bytes written into each target."""
        nbytes = [0] * len(self.targets)
        for (_, target), size in self.traffic.items():
            nbytes[target] += size
        return tuple(nbytes)

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Return the traffic between different devices, by (rank, target)."""
        return {
            (rank, target): size
            for (rank, target), size in self.traffic.items()
            if self.places[rank] != self.targets[target].place
        }

    def copies(self, rank: int) -> list[Copy]:
        """List the copies of one rank in the order in which the rank writes them.

        Targets on its own device come first. Each rank begins with a different target, so that the
        ranks do not all write to the same one. Copies for one target are ordered by offset.
        """
        copies: dict[int, list[Copy]] = defaultdict(list)
        for name, piece, targets, sends in self.slices:
            for target in targets:
                for sent, held in sends.get((rank, target), ()):
                    copies[target].append(_copy(name, piece, sent, held, rank, target))
        count = len(self.targets)
        order = sorted(
            copies, key=lambda t: (self.targets[t].place != self.places[rank], (t - rank) % count)
        )
        by_offset = (sorted(copies[target], key=attrgetter("offset")) for target in order)
        return list(chain.from_iterable(by_offset))


def _copy(name: str, piece: ParamSlice, sent: Box, held: Box, rank: int, target: int) -> Copy:
    strides, numbers = piece.strides, row_major(piece.global_shape)
    within = difference(sent.start, piece.start)
    return Copy(
        rank=rank,
        target=target,
        name=name,
        start=difference(sent.start, held.start),
        shape=sent.shape,
        dtype=piece.dtype,
        offset=piece.offset + dot(within, strides) * piece.torch_dtype.itemsize,
        strides=strides,
        index_base=piece.index_base + dot(sent.start, numbers),
        index_strides=numbers,
    )


class _Parameter(NamedTuple):
    """The shape of a whole parameter of the trainer, and the ranks that hold its boxes."""

    shape: Ints
    held: Held


def make_plan(
    shards: Iterable[SourceShard], places: Sequence[str], targets: Sequence[WeightLayout]
) -> SyncPlan:
    """Plan how the shards of all ranks are written into all targets.

    Layers of a model repeat each other, so senders are computed once per kind of parameter.
    Duplicates of shards are allowed. `places` has the device of each rank. A ValueError lists names
    that are missing, unknown or duplicated, shapes that differ, and elements that no rank holds.
    """
    params = _parameters(shards)
    alike: dict[str, list[int]] = defaultdict(list)  # layout hash -> targets
    for number, target in enumerate(targets):
        alike[target.manifest.layout_hash].append(number)
    manifests = [targets[numbers[0]].manifest for numbers in alike.values()]
    target_places = [target.place for target in targets]
    turns: Counter[object] = Counter()
    senders: dict[object, Sends] = {}
    slices: list[Planned] = []
    for name, piece, layout in _fitting(spelled(manifests, params), params):
        held, numbers = params[name].held, tuple(alike[layout])
        box = Box(piece.start, piece.shape)
        kind = id(held), box, numbers
        turn = turns[kind] % max(len(ranks) for _, ranks in held)
        turns[kind] += 1
        if (kind, turn) not in senders:
            senders[kind, turn] = _sends(box, held, numbers, places, target_places, turn)
        slices.append(Planned(name, piece, numbers, senders[kind, turn]))
    return SyncPlan(targets=targets, places=places, slices=slices)


def _parameters(shards: Iterable[SourceShard]) -> dict[str, _Parameter]:
    parts: dict[str, set[SourceShard]] = defaultdict(set)
    for shard in shards:
        parts[shard.name].add(replace(shard, name=""))
    kinds: dict[frozenset[SourceShard], _Parameter] = {}
    params = {}
    for name in sorted(parts):
        kind = frozenset(parts[name])
        if kind not in kinds:
            kinds[kind] = _Parameter(next(iter(kind)).global_shape, held_boxes(name, kind))
        params[name] = kinds[kind]
    return params


def _fitting(
    manifests: Sequence[Manifest], params: Mapping[str, _Parameter]
) -> list[tuple[str, ParamSlice, str]]:
    """Match slices with the trainer's parameters, or raise a ValueError that lists all problems.

    The result has (the trainer's name, slice, hash of its layout) for each slice that is not empty.
    """
    slices = chain.from_iterable(manifest.slices for manifest in manifests)
    anywhere = {piece.name for piece in slices}
    fitting: list[tuple[str, ParamSlice, str]] = []
    problems: list[str] = []
    for manifest in manifests:
        sources: dict[str, list[str]] = defaultdict(list)  # stored name -> the trainer's
        for name in params:
            sources[manifest.aliases.get(name, name)].append(name)
        problems += name_problems(sources, manifest, anywhere)
        for piece in manifest.slices:
            names = sources.get(piece.name, ())
            if len(names) != 1 or not math.prod(piece.shape):
                continue
            if problem := _misfit(params[names[0]], piece):
                problems.append(f"{piece.name}: {problem}")
            fitting.append((names[0], piece, manifest.layout_hash))
    if problems:
        rule = "the trainer's weights do not fit the rollout's, nothing was written"
        raise ValueError(f"{rule}: {listed(list(dict.fromkeys(problems)))}")
    return fitting


def _misfit(param: _Parameter, piece: ParamSlice) -> str | None:
    if param.shape != piece.global_shape:
        return f"shape {param.shape} in the trainer, {piece.global_shape} in the rollout"
    box = Box(piece.start, piece.shape)
    lacking = box.volume - sum(common.volume for common, _, _ in cover(box, param.held))
    return f"{lacking} of {box.volume} elements are held by no rank" if lacking else None


def _sends(
    box: Box,
    held: Held,
    targets: Ints,
    places: Sequence[str],
    target_places: Sequence[str],
    turn: int,
) -> Sends:
    """Choose the ranks that send a box to targets.

    For each part of the box and each target, a holder on the target's device is preferred, then one
    on its machine. Equally near holders take turns, beginning with number `turn`, which differs
    between parameters of the same kind to spread the work evenly over the ranks.
    """
    machines = [machine_of(place) for place in places]
    sends: dict[tuple[int, int], list[tuple[Box, Box]]] = defaultdict(list)
    for common, whole, ranks in cover(box, held):
        turns: Counter[Ints] = Counter()
        for target in targets:
            place = target_places[target]
            near = tuple(rank for rank in ranks if places[rank] == place)
            same = tuple(rank for rank in ranks if machines[rank] == machine_of(place))
            choice = near or same or ranks
            rank = choice[(turn + turns[choice]) % len(choice)]
            turns[choice] += 1
            sends[rank, target].append((common, whole))
    return dict(sends)


def name_problems(
    sources: Mapping[str, Sequence[str]], manifest: Manifest, anywhere: Collection[str]
) -> list[str]:
    """List names that only one side has, or that the trainer has twice.

    `sources` has the trainer's names by stored name, `anywhere` the names that any target stores.
    """
    stored = {piece.name for piece in manifest.slices}
    # A module without slices holds only padding on this rank.
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


def spelled(manifests: Iterable[Manifest], names: Collection[str]) -> list[Manifest]:
    """Rewrite manifests in the trainer's spelling of parameter names.

    If the trainer stores a parameter as several parts (`spellings`), the manifest gets one slice
    per part under the part's name. A target that does not hold a part gets a slice without rows.
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
    """Return the slice's share of a part, or None if there is none."""
    common = Box(piece.start, piece.shape).intersect(Box(stored.start, stored.box))
    if common is None:
        return None
    strides, last = piece.strides, -len(stored.shape)
    within = difference(common.start, piece.start)
    return replace(
        piece,
        name=stored.name,
        offset=piece.offset + dot(within, strides) * piece.torch_dtype.itemsize,
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
