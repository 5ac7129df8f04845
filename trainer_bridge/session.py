"""One weight update, seen from the writer: map the rollout's pages, write this rank's copies, say what was written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

import memsaver
from rollout.types import WeightOffer, WriteReceipt
from trainer_bridge.ops.cast_copy import all_finite, cast_copy
from trainer_bridge.plan import Copy, Plan, torch_dtype

OnCopy = Callable[[int, int], None]
"""Called before each copy with (copies done, copies of this rank)."""


class WriteSession:
    """Writes the copies of one rank for one offer. Everything that can be refused is refused before the first byte."""

    def __init__(
        self,
        offer: WeightOffer,
        plan: Plan,
        *,
        rank: int = 0,
        on_copy: OnCopy | None = None,
        check_finite: bool = False,
    ) -> None:
        """check_finite: refuse weights with NaN or infinity, at the cost of reading them twice."""
        if plan.layout_hash != offer.manifest.layout_hash:
            raise ValueError(
                f"stale plan for version {offer.version}: made for layout {plan.layout_hash}, "
                f"the rollout offers {offer.manifest.layout_hash}; plan again"
            )
        self.offer = offer
        self._copies = [copy for copy in plan.copies if copy.rank == rank]
        self._on_copy = on_copy
        self._check_finite = check_finite

    def write(self, sources: Mapping[str, Tensor]) -> WriteReceipt:
        """sources: this rank's shards by name. Returns the receipt of this rank's part; the lease is over on return."""
        start = time.perf_counter()
        self._refuse(sources)
        total = 0
        with memsaver.attach(self.offer.ticket) as lease:
            if lease.nbytes < self.offer.manifest.nbytes:
                raise ValueError(
                    f"the rollout shares {lease.nbytes} bytes, its manifest describes {self.offer.manifest.nbytes}; "
                    "offer all of tag weights"
                )
            for done, copy in enumerate(self._copies):
                if self._on_copy is not None:
                    self._on_copy(done, len(self._copies))
                target = lease.tensor(copy.shape, torch_dtype(copy.dtype), copy.offset)
                total += cast_copy(target, _rows(sources, copy), copy.index_base)
                del target  # dangles when the lease ends
        return WriteReceipt(
            version=self.offer.version,
            layout_hash=self.offer.manifest.layout_hash,
            digest=total % (1 << 64),
            nbytes=sum(copy.nbytes for copy in self._copies),
            seconds=time.perf_counter() - start,
        )

    def _refuse(self, sources: Mapping[str, Tensor]) -> None:
        problems = []
        for copy in self._copies:
            source = sources.get(copy.name)
            if source is None:
                problems.append(f"no shard {copy.name}")
            elif source.shape[0] < copy.row + copy.shape[0] or source.shape[1:] != copy.shape[1:]:
                problems.append(f"{copy.name}: shard {tuple(source.shape)} lacks rows {copy.row}+{copy.shape[0]}")
            elif self._check_finite and not all_finite(_rows(sources, copy)):
                problems.append(f"{copy.name} has NaN or infinite values")
        if problems:
            raise ValueError(f"version {self.offer.version} refused, nothing was written: {'; '.join(problems[:20])}")


def _rows(sources: Mapping[str, Tensor], copy: Copy) -> Tensor:
    return sources[copy.name][copy.row : copy.row + copy.shape[0]]
