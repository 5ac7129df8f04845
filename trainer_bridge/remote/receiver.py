"""The actor of an engine rank, with a receiving rank for machines without a trainer rank.

No trainer rank can map the pages of an engine on such a machine. A rank of the sync without shards,
in the engine's process, gets the bytes in bounded messages and writes them into the engine's pages,
whose digest the engine compares as after any sync.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from memsaver.system.devices import place_of
from rollout.actor import RolloutActor
from rollout.engine import InFlight
from rollout.process_group import RankAddress, join_apart, leave
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync


class RolloutRankActor(RolloutActor):
    """A `RolloutActor` that can take part in syncs as the receiving rank of its engine."""

    _group: dist.ProcessGroup | None = None
    _sync: WeightSync | None = None

    def connect(self, targets: Sequence[object], address: RankAddress) -> None:
        """Join the ranks of a sync at `address`; a collective call with `TrainerActor.connect`.

        `targets` is empty: this rank owns the engine of its process.
        """
        assert not targets
        self._disconnect()
        device = torch.device(self._device)
        self._group = join_apart(address, device)
        agreement, place = group_agreement(self._group), place_of(device)
        self._sync = WeightSync((), dict, [self.held], agreement, place=place, device=device)

    def sync_weights(
        self, version: int, *, shadow: bool = False, in_flight: InFlight = "refuse"
    ) -> SyncReceipt:
        """Receive, verify and serve a version; a collective call with the trainer's ranks."""
        assert self._sync is not None
        return self._sync.follow(version, shadow=shadow, in_flight=in_flight)

    def _disconnect(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._group is not None:
            leave(self._group)
            self._group = None
