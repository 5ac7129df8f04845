"""Works out how parameters are spread over the trainer's ranks, and who of several holders of an
element sends it.

The layers of a model repeat each other: what is worked out here is worked out once for a kind of
parameter.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from memsaver.ops.layout import row_major
from trainer_bridge.sync.shards import Box, Ints, SourceShard, difference, dot, uncovered


class Cut(NamedTuple):
    """The elements that a slice of a parameter and the part that `ranks` hold have in common.

    source, at: start in the ranks' part, and in the slice. number: of the first element in the
    whole parameter. volume: elements.
    """

    ranks: Ints
    source: Ints
    at: Ints
    shape: Ints
    number: int
    volume: int


Deal = dict[tuple[int, int], list[Cut]]
"""(rank, target) -> what the rank sends to the target."""


class _Held(NamedTuple):
    """A SourceShard without its name and dtype."""

    whole: Ints
    start: Ints
    shape: Ints
    rank: int


class Spread:
    """One way to spread parameters of `shape`: disjoint boxes, each with the ranks that hold it.

    problem: why this is none; the rest is empty then. replicas: the most ranks that hold the same
    box.
    """

    def __init__(self, parts: Sequence[_Held]) -> None:
        """parts: of all ranks, empty ones too."""
        self.shape = parts[0].whole
        self._holders: dict[Box, list[int]] = {}
        self._cuts: dict[Box, tuple[Cut, ...]] = {}
        self._gaps: list[Box] = []
        self.problem = self._fill(parts)
        self.replicas = max(map(len, self._holders.values()), default=1)

    def cuts(self, box: Box) -> tuple[Cut, ...]:
        """Covers `box`, up to what `gap` tells."""
        if box not in self._cuts:
            self._cuts[box] = tuple(self._cut(box))
        return self._cuts[box]

    def gap(self, box: Box) -> Ints | None:
        """The first element of `box` that no rank holds, or None."""
        return min((gap.start for each in self._gaps if (gap := box.intersect(each))), default=None)

    def _fill(self, parts: Sequence[_Held]) -> str | None:
        shapes = sorted({part.whole for part in parts})
        if len(shapes) > 1:
            return f"shapes {' and '.join(map(str, shapes))} in the trainer"
        seen: set[int] = set()
        holders: dict[Box, list[int]] = defaultdict(list)
        space = Box((0,) * len(self.shape), self.shape)
        for _, start, shape, rank in parts:
            box = Box(start, shape)
            if rank in seen:
                return f"rank {rank} holds two different parts"
            if not len(start) == len(shape) == len(self.shape) or (
                box.volume and space.intersect(box) != box
            ):
                return f"rank {rank} holds {shape} at {start}, outside {self.shape}"
            seen.add(rank)
            if box.volume:
                holders[box].append(rank)
        gaps = uncovered(space, holders)
        if sum(box.volume for box in holders) + sum(gap.volume for gap in gaps) != space.volume:
            return _overlap(list(holders.items()))
        self._holders, self._gaps = dict(holders), gaps
        return None

    def _cut(self, box: Box) -> Iterable[Cut]:
        strides = row_major(self.shape)
        for held, ranks in self._holders.items():
            if common := box.intersect(held):
                yield Cut(
                    ranks=tuple(ranks),
                    source=difference(common.start, held.start),
                    at=difference(common.start, box.start),
                    shape=common.shape,
                    number=dot(common.start, strides),
                    volume=common.volume,
                )


class Sources:
    """Collects what all ranks of a trainer hold, by the trainer's names. key: a hash of it all."""

    def __init__(self, shards: Iterable[SourceShard], places: Sequence[str]) -> None:
        """places: device of each rank; a ValueError names one without. Shards may come twice."""
        parts: dict[str, set[_Held]] = defaultdict(set)
        for shard in shards:
            parts[shard.name].add(_Held(shard.global_shape, shard.start, shard.shape, shard.rank))
        held = chain.from_iterable(parts.values())
        if missing := {part.rank for part in held if not 0 <= part.rank < len(places)}:
            text = f"ranks {sorted(missing)} hold shards, but places lists {len(places)}"
            raise ValueError(f"{text}; one a rank is needed")
        self.places = tuple(places)
        self.spreads: dict[str, Spread] = {}
        digest = hashlib.sha256(repr(self.places).encode())
        made: dict[tuple[_Held, ...], Spread] = {}
        for name in sorted(parts):
            kind = tuple(sorted(parts[name]))
            if kind not in made:
                made[kind] = Spread(kind)
                digest.update(repr([tuple(part) for part in kind]).encode())
            self.spreads[name] = made[kind]
        numbers = {id(spread): i for i, spread in enumerate(made.values())}
        digest.update(
            repr([(name, numbers[id(spread)]) for name, spread in self.spreads.items()]).encode()
        )
        self.key = digest.hexdigest()


def deal(
    cuts: Sequence[Cut],
    targets: Sequence[int],
    target_places: Sequence[str],
    places: Sequence[str],
    turn: int,
) -> Deal:
    """Choose one holder of each cut for each of `targets`: one on the target's device, else holders
    in turn.

    places: of the trainer's ranks. turn: differs between parameters that are dealt alike, so that
    what does not divide evenly does not always fall to the same rank.
    """
    dealt: Deal = defaultdict(list)
    for cut in cuts:
        turns: dict[tuple[int, ...], int] = defaultdict(int)
        for target in targets:
            near = tuple(rank for rank in cut.ranks if places[rank] == target_places[target])
            choice = near or cut.ranks
            dealt[choice[(turn + turns[choice]) % len(choice)], target].append(cut)
            turns[choice] += 1
    return dict(dealt)


def _overlap(held: Sequence[tuple[Box, list[int]]]) -> str:
    for i, (box, ranks) in enumerate(held):
        for other, others in held[i + 1 :]:
            if common := box.intersect(other):
                text = f"element {common.start} is held by ranks {ranks[0]} and {others[0]}"
                return f"{text}, in different parts; replicas must hold the same part"
    raise AssertionError(held)
