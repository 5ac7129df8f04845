"""Defines what the cycle and recipes drive: a `Trainer`, or a handle on actors that hold one."""

from typing import Protocol

from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.training.batch import SequenceBatch
from trainer_bridge.training.offload import Wait


class TrainerSide(Protocol):
    """Learns, scores, and gives its memory and its weights away. The contracts are `Trainer`'s.

    `Cycle` asks for the first five methods alone. Of the others, the last three are for recipes
    with a reference or a critic.
    """

    def empty_cache(self) -> None: ...

    def park(self, *tags: str, wait: bool = True, into: str | None = None) -> None: ...

    def restore(self, *tags: str, wait: Wait = True) -> None: ...

    def sync_weights(self, version: int) -> SyncReceipt: ...

    def share_weights(self, version: int) -> SyncReceipt: ...

    def compute_log_prob(self, batch: SequenceBatch) -> list[list[float]]: ...

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]: ...

    def compute_ref_log_prob(self, batch: SequenceBatch) -> list[list[float]]: ...

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]: ...

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]: ...
