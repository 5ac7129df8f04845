"""Writes one rank's part of a plan: a table of copies for each target, made once."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from trainer_bridge.errors import listed
from trainer_bridge.sync.boxes import torch_dtype
from trainer_bridge.sync.cast_copy import CastCopy, OnPart, all_finite, placements
from trainer_bridge.sync.lora_merge import DerivedCopies, LowRank
from trainer_bridge.sync.plan import Plan
from trainer_bridge.sync.shards import SourceShard


@dataclass(frozen=True, kw_only=True)
class Written:
    """Tells what a rank wrote into a target; link_bytes: to another device. digest: mod 2**64."""

    nbytes: int
    link_bytes: int
    digest: int


class RankCopies:
    """The copies of rank `rank`, with the shards they come from.

    They are good as long as the plan's layout is offered and the shards keep their addresses.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Iterable[SourceShard],
        sources: Mapping[str, Tensor],
        *,
        rank: int = 0,
        derived: Collection[str] = (),
        targets: Collection[int] | None = None,
    ) -> None:
        """shards: this rank's; sources: their tensors, by name. derived: which of them are made of
        their shard (`LowRank`). targets: write into these only; None: all. A ValueError lists
        shards that are missing or of another shape.
        """
        boxes = {shard.name: shard for shard in shards}
        copies = plan.copies(rank)
        self.names = sorted({copy.name for copy in copies})
        self._dtypes: dict[str, set[str]] = {name: set() for name in self.names}
        for copy in copies:
            self._dtypes[copy.name].add(copy.dtype)
        problems = [problem for name in self.names if (problem := _misfit(sources, boxes[name]))]
        if problems:
            rule = f"the shards of rank {rank} do not fit the plan, nothing was written"
            raise ValueError(f"{rule}: {listed(problems)}")
        self.sources = sources
        copies = [copy for copy in copies if targets is None or copy.target in targets]
        self._nbytes: dict[int, int] = {}
        self._casts: dict[int, CastCopy] = {}
        for target in sorted({copy.target for copy in copies}):
            mine = [copy for copy in copies if copy.target == target]
            self._nbytes[target] = sum(copy.nbytes for copy in mine)
            plain = [copy for copy in mine if copy.name not in derived]
            places = (placements(copy, sources[copy.name]) for copy in plain)
            self._casts[target] = CastCopy(list(chain.from_iterable(places)))
        self._derived = DerivedCopies([copy for copy in copies if copy.name in derived], sources)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._remote = [
            target for target in self._casts if plan.targets[target].place != plan.places[rank]
        ]

    @property
    def targets(self) -> list[int]:
        """Returns the numbers of the targets that this rank writes into."""
        return list(self._casts)

    def write(
        self,
        pages: Mapping[int, Tensor],
        derived: Mapping[str, LowRank],
        on_part: OnPart | None = None,
    ) -> dict[int, Written]:
        """Write all copies into the targets' bytes (by target: uint8, from the start of the tag),
        and wait.

        On a GPU the writes over links begin first, each on a stream of its own, and the others run
        beside them.
        """
        self._start_remote(pages, on_part)
        for target in self._casts.keys() - set(self._remote):
            self._casts[target].start(pages[target], on_part)
        self._derived.start(pages, derived)
        made = self._derived.digests()
        return {
            target: Written(
                nbytes=self._nbytes[target],
                link_bytes=self._nbytes[target] if target in self._remote else 0,
                digest=cast.result() + made.get(target, 0),
            )
            for target, cast in self._casts.items()
        }

    def check(self, derived: Mapping[str, LowRank], finite: bool) -> None:
        """A ValueError lists factors that do not fit their base and, if `finite`, what would be NaN
        or infinite in the dtype that it is written in: all shards are read for that, and the
        derived ones computed.
        """
        misfits = [
            derived[name].misfit(name, self.sources[name]) for name in self.names if name in derived
        ]
        problems = [problem for problem in misfits if problem is not None]
        if finite and not problems:
            problems += self._not_finite(derived)
        if problems:
            raise ValueError(f"the weights are refused, nothing was written: {listed(problems)}")

    def _not_finite(self, derived: Mapping[str, LowRank]) -> Iterator[str]:
        for name, dtypes in self._dtypes.items():
            beyond = [dtype for dtype in dtypes if not self._finite_as(name, dtype, derived)]
            if not beyond:
                continue
            if name in derived and not derived[name].finite():
                yield f"the adapter of {name} has NaN or infinite values"
            elif not all_finite(self.sources[name]):
                yield f"{name} has NaN or infinite values"
            else:
                yield f"{name} has values beyond the range of {' and '.join(sorted(beyond))}"

    def _finite_as(self, name: str, dtype: str, derived: Mapping[str, LowRank]) -> bool:
        if name in derived:
            return self._derived.finite(name, derived[name], torch_dtype(dtype))
        return all_finite(self.sources[name], torch_dtype(dtype))

    def _start_remote(self, pages: Mapping[int, Tensor], on_part: OnPart | None) -> None:
        """One program a multiprocessor fills NVLink, and leaves room for the copies on this GPU."""
        for target in self._remote:
            cast = self._casts[target]
            if not cast.on_gpu:
                cast.start(pages[target], on_part)
                continue
            if target not in self._streams:
                self._streams[target] = torch.cuda.Stream()
            stream = self._streams[target]
            # The step that made the weights may be queued.
            stream.wait_stream(torch.cuda.current_stream())
            programs = torch.cuda.get_device_properties(stream.device).multi_processor_count
            with torch.cuda.stream(stream):
                cast.start(pages[target], on_part, programs=programs)


def _misfit(sources: Mapping[str, Tensor], shard: SourceShard) -> str | None:
    source = sources.get(shard.name)
    if source is None:
        return f"no shard {shard.name}"
    if tuple(source.shape) != shard.shape:
        return f"{shard.name}: shard {tuple(source.shape)}, {shard.shape} in the plan"
    return None
