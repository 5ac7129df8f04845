"""One weight update, seen from the writer: map the rollout's pages, write this rank's copies, say what was written."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

import memsaver
from rollout.types import WeightOffer, WriteReceipt
from trainer_bridge.ops.cast_copy import CastCopy, OnPart, Placement, all_finite
from trainer_bridge.plan import Copy, Plan, torch_dtype

OnCopy = OnPart
"""Called before each batch of copies with (copies written, copies of this rank).

On the CPU each copy is a batch, on a GPU up to 1 GiB of them are; one batch begins at half the copies. Without a hook a
GPU gets all of them at once.
"""


class RankCopies:
    """What one rank writes under one plan, with the shards it comes from: checked once, written with every update.

    Good as long as the plan's layout is offered and the shards keep their addresses.
    """

    def __init__(self, plan: Plan, sources: Mapping[str, Tensor], *, rank: int = 0) -> None:
        """sources: this rank's shards by name. A ValueError lists those that are missing or too small."""
        copies = [copy for copy in plan.copies if copy.rank == rank]
        if problems := [problem for copy in copies if (problem := _misfit(sources, copy))]:
            raise ValueError(f"the shards of rank {rank} do not fit the plan, {_listed(problems)}")
        self.layout_hash = plan.layout_hash
        self.sources = sources
        self.nbytes = sum(copy.nbytes for copy in copies)
        self._rows = [(copy.name, _rows(sources, copy)) for copy in copies]
        self._cast_copy = CastCopy(
            [
                Placement(source=rows, offset=copy.offset, dtype=torch_dtype(copy.dtype), index_base=copy.index_base)
                for copy, (_, rows) in zip(copies, self._rows, strict=True)
            ]
        )

    def write(self, target: Tensor, on_copy: OnCopy | None = None) -> int:
        """Write all copies into the rollout's bytes (uint8, from the start of the tag). Returns their digest."""
        return self._cast_copy.run(target, on_copy)

    def not_finite(self) -> list[str]:
        """Names of shards with NaN or infinite values in the rows to be written; reads all of them."""
        return [name for name, rows in self._rows if not all_finite(rows)]


class WriteSession:
    """Writes the copies of one rank for one offer. Everything that can be refused is refused before the first byte."""

    def __init__(
        self,
        offer: WeightOffer,
        copies: RankCopies,
        *,
        on_copy: OnCopy | None = None,
        check_finite: bool = False,
    ) -> None:
        """check_finite: refuse weights with NaN or infinity, at the cost of reading them twice."""
        if copies.layout_hash != offer.manifest.layout_hash:
            raise ValueError(
                f"stale plan for version {offer.version}: made for layout {copies.layout_hash}, "
                f"the rollout offers {offer.manifest.layout_hash}; plan again"
            )
        self.offer = offer
        self._copies = copies
        self._on_copy = on_copy
        self._check_finite = check_finite

    def write(self) -> WriteReceipt:
        """Returns the receipt of this rank's part; the lease is over on return."""
        start = time.perf_counter()
        if self._check_finite and (names := self._copies.not_finite()):
            problems = [f"{name} has NaN or infinite values" for name in names]
            raise ValueError(f"version {self.offer.version} refused, {_listed(problems)}")
        with memsaver.attach(self.offer.ticket) as lease:
            if lease.nbytes < self.offer.manifest.nbytes:
                raise ValueError(
                    f"the rollout shares {lease.nbytes} bytes, its manifest describes {self.offer.manifest.nbytes}; "
                    "offer all of tag weights"
                )
            target = lease.tensor((lease.nbytes,), torch.uint8)
            mapped = time.perf_counter()
            digest = self._copies.write(target, self._on_copy)
            written = time.perf_counter()
            del target  # dangles when the lease ends
        return WriteReceipt(
            version=self.offer.version,
            layout_hash=self.offer.manifest.layout_hash,
            digest=digest,
            nbytes=self._copies.nbytes,
            seconds=time.perf_counter() - start,
            copy_seconds=written - mapped,
        )


def _misfit(sources: Mapping[str, Tensor], copy: Copy) -> str | None:
    source = sources.get(copy.name)
    if source is None:
        return f"no shard {copy.name}"
    if source.shape[0] < copy.row + copy.shape[0] or source.shape[1:] != copy.shape[1:]:
        return f"{copy.name}: shard {tuple(source.shape)} lacks rows {copy.row}+{copy.shape[0]}"
    return None


def _listed(problems: list[str], limit: int = 20) -> str:
    more = f" and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"nothing was written: {'; '.join(problems[:limit])}{more}"


def _rows(sources: Mapping[str, Tensor], copy: Copy) -> Tensor:
    return sources[copy.name][copy.row : copy.row + copy.shape[0]]
