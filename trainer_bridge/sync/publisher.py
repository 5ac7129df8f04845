"""Gives a trainer's weights to rollouts: parameters written into their pages, merged with adapters,
or pages of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memsaver.common.device_ids import place_of
from memsaver.errors import StateError
from rollout.protocols import SyncTarget
from trainer_bridge.sync.cast_copy import OnPart
from trainer_bridge.sync.consensus import Consensus, group_consensus
from trainer_bridge.sync.lora_merge import LowRank
from trainer_bridge.sync.page_share import PageShare
from trainer_bridge.sync.shards import SourceShard, dtensor_shards
from trainer_bridge.sync.transport.routes import Transport
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync
from trainer_bridge.tags import PARAMS
from trainer_bridge.training.shards import local_shard

if TYPE_CHECKING:
    from memsaver import MemorySaver
    from rollout.types import Manifest
    from trainer_bridge.training.adapters import Adapters


class Publisher:
    """Publishes for one rank; all ranks call every method, whose contracts are the trainer's."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        device: torch.device,
        saver: MemorySaver | None,
        layout: Manifest | None,
        adapters: Adapters | None,
    ) -> None:
        """params: sharded, by checkpoint name.

        layout: of the rollout that may serve their pages.
        """
        self._params = params
        self._device = device
        self._saver = saver
        self._layout = layout
        self._adapters = adapters
        self._factors: Mapping[str, LowRank] = {}
        self._shards: dict[str, Tensor] = {}
        self._addresses: list[int] = []
        self._sync: WeightSync | None = None
        self._share: PageShare | None = None

    def connect(
        self, targets: Sequence[SyncTarget], consensus: Consensus | None, transport: str
    ) -> None:
        if consensus is None:
            assert dist.group.WORLD is not None
            consensus = group_consensus(dist.group.WORLD)
        self.close()
        self._sync = WeightSync(
            self._my_shards(),
            self.shards,
            targets,
            consensus,
            place=place_of(self._device),
            derived=lambda: self._factors,
            transport=transport,
            group=dist.group.WORLD,
        )
        if self._layout is not None:
            assert self._saver is not None
            self._share = PageShare(
                self._saver, PARAMS, self._layout, self.shards, targets, consensus
            )

    @property
    def transports(self) -> tuple[Transport, ...]:
        return () if self._sync is None else self._sync.transports

    def sync(
        self, version: int, *, shadow: bool, check_finite: bool, on_part: OnPart | None
    ) -> SyncReceipt:
        if self._sync is None:
            rule = "sync_weights() has no rollout to write to"
            raise StateError(f"{rule}; call connect([engine]) first, on every rank")
        names = None
        if self._adapters is not None:
            names = self._adapters.names if self._sync.holds() else None
            self._factors = self._adapters.factors()
        try:
            return self._sync.sync(
                version, shadow=shadow, names=names, check_finite=check_finite, on_part=on_part
            )
        finally:
            self._factors = {}  # what was gathered for it

    def share(self, version: int, verify: bool | None) -> SyncReceipt:
        if self._share is None:
            rule = "share_weights() needs parameters that lie as the rollout's weights do"
            remedy = "make the trainer with layout=engine.manifest, and call connect([engine])"
            raise StateError(f"{rule}; {remedy}")
        return self._share.share(version, verify=verify)

    def shards(self) -> dict[str, Tensor]:
        addresses = [_address(param) for param in self._params.values()]
        if addresses != self._addresses:
            self._shards = {name: local_shard(param) for name, param in self._params.items()}
            self._addresses = addresses
        return self._shards

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()

    def _my_shards(self) -> list[SourceShard]:
        rank, found = dist.get_rank(), []
        for name, param in self._params.items():
            assert isinstance(param, DTensor)
            found += [shard for shard in dtensor_shards(name, param) if shard.rank == rank]
        return found


def _address(param: Tensor) -> int:
    """Returns the local shard's address. `to_local` takes a hundred times as long, every time."""
    assert isinstance(param, DTensor)
    return param._local_tensor.data_ptr()
