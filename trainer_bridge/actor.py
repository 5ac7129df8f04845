"""The trainer as a Ray actor, and blocking handles on both actors. ray is imported when first needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import memsaver
from rollout.protocols import Progress
from rollout.types import (
    CommitReceipt,
    Completion,
    Manifest,
    PackedBox,
    SamplingParams,
    VerifyReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)
from trainer_bridge.batch import SequenceBatch
from trainer_bridge.config import TrainerConfig
from trainer_bridge.errors import ActorDied, ActorTimeout
from trainer_bridge.session import SyncReceipt
from trainer_bridge.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from memsaver import Event, Report, Ticket, Usage


class TrainerActor:
    """A `Trainer` with a saver of its own, in a process of its own. Methods are the trainer's.

    Made empty, so that the process starts while others work; `build` takes the memory.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config

    def build(self, layout: Manifest | None = None) -> None:
        self.saver = memsaver.MemorySaver(device=self.config.device)
        self.trainer = Trainer(self.config, self.saver, layout=layout)

    def compute_log_prob(
        self, batch: SequenceBatch, temperature: float | None = None, *, base: bool = False
    ) -> list[list[float]]:
        return self.trainer.compute_log_prob(batch, temperature, base=base)

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        return self.trainer.update_actor(batch)

    def compute_ref_log_prob(self, batch: SequenceBatch, temperature: float | None = None) -> list[list[float]]:
        return self.trainer.compute_ref_log_prob(batch, temperature)

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]:
        return self.trainer.compute_values(batch)

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
        return self.trainer.update_critic(batch)

    def park(self, *tags: str) -> None:
        self.trainer.park(*tags)

    def restore(self, *tags: str) -> None:
        self.trainer.restore(*tags)

    def empty_cache(self) -> None:
        self.trainer.empty_cache()

    def connect(self, rollout: RemoteRollout) -> None:
        self.trainer.connect([rollout])

    def sync_weights(self, version: int) -> SyncReceipt:
        return self.trainer.sync_weights(version)

    def share_weights(self, version: int, *, verify: bool | None = None) -> SyncReceipt:
        return self.trainer.share_weights(version, verify=verify)

    def save_checkpoint(self, directory: str, extra: dict[str, Any] | None = None) -> None:
        self.trainer.save_checkpoint(directory, extra)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        return self.trainer.load_checkpoint(directory)

    def save_adapters(self, directory: str) -> None:
        self.trainer.save_adapters(directory)

    def report(self) -> Report:
        return self.saver.report()

    def drain_events(self) -> list[Event]:
        return self.saver.drain_events()

    def take_usage(self) -> Usage:
        return self.saver.take_usage()

    def pid(self) -> int:
        return os.getpid()


class RemoteActor:
    """A handle on a Ray actor whose calls block.

    What the method raised is raised here. `ActorDied` and `ActorTimeout` name the actor and the method.
    """

    def __init__(self, handle: Any, name: str, timeout: float) -> None:
        """timeout: seconds for one call."""
        self.handle = handle
        self.name = name
        self.timeout = timeout

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.result(getattr(self.handle, method).remote(*args, **kwargs), method)

    def result(self, reference: Any, method: str) -> Any:
        """Wait for a call that was started with `handle.method.remote()`."""
        import ray

        try:
            return ray.get(reference, timeout=self.timeout)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise ActorTimeout(self.name, method, f"gave no answer for {self.timeout:g} s") from error
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # what the constructor raised is the last line of the text
                reason = f"could not be made ({str(error).strip().splitlines()[-1].strip()})"
                raise ActorDied(self.name, "__init__", reason) from error
            raise ActorDied(self.name, method, "died") from error


class RemoteTrainer(RemoteActor):
    """Methods and contracts of `Trainer`."""

    def compute_log_prob(
        self, batch: SequenceBatch, temperature: float | None = None, *, base: bool = False
    ) -> list[list[float]]:
        return self.call("compute_log_prob", batch, temperature, base=base)

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        return self.call("update_actor", batch)

    def compute_ref_log_prob(self, batch: SequenceBatch, temperature: float | None = None) -> list[list[float]]:
        return self.call("compute_ref_log_prob", batch, temperature)

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]:
        return self.call("compute_values", batch)

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
        return self.call("update_critic", batch)

    def park(self, *tags: str) -> None:
        self.call("park", *tags)

    def restore(self, *tags: str) -> None:
        self.call("restore", *tags)

    def empty_cache(self) -> None:
        self.call("empty_cache")

    def connect(self, rollout: RemoteRollout) -> None:
        self.call("connect", rollout)

    def sync_weights(self, version: int) -> SyncReceipt:
        return self.call("sync_weights", version)

    def share_weights(self, version: int, *, verify: bool | None = None) -> SyncReceipt:
        return self.call("share_weights", version, verify=verify)

    def save_checkpoint(self, directory: str, extra: dict[str, Any] | None = None) -> None:
        self.call("save_checkpoint", directory, extra)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        return self.call("load_checkpoint", directory)

    def save_adapters(self, directory: str) -> None:
        self.call("save_adapters", directory)

    def report(self) -> Report:
        return self.call("report")

    def drain_events(self) -> list[Event]:
        return self.call("drain_events")

    def take_usage(self) -> Usage:
        return self.call("take_usage")


class RemoteRollout(RemoteActor):
    """Methods and contracts of `rollout.Engine`."""

    @property
    def weights_version(self) -> int:
        return self.call("weights_version")

    def served_version(self) -> int | None:
        return self.call("served_version")

    def unavailable_reason(self) -> str | None:
        return self.call("unavailable_reason")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """on_progress runs in the actor: pass something picklable that sends the numbers on."""
        return self.call("generate", prompts, params, on_progress)

    def sleep(self, level: int = 1, unfinished: str = "raise", tags: Sequence[str] | None = None) -> None:
        self.call("sleep", level, unfinished, tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.call("wake_up", tags)

    def weight_layout(self) -> WeightLayout:
        return self.call("weight_layout")

    def begin_update(self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None) -> WeightOffer:
        return self.call("begin_update", version, shadow=shadow, names=names)

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """`data` is copied once: a view would take all bytes of its buffer along."""
        self.call("write_update", boxes, data.clone())

    def verify_update(self, receipt: WriteReceipt) -> VerifyReceipt:
        return self.call("verify_update", receipt)

    def commit_update(self, version: int) -> CommitReceipt:
        return self.call("commit_update", version)

    def adopt_update(self, version: int, ticket: Ticket, layout_hash: str, digest: int | None = None) -> CommitReceipt:
        return self.call("adopt_update", version, ticket, layout_hash, digest)

    def abort_update(self, reason: str) -> None:
        self.call("abort_update", reason)

    def report(self) -> Report:
        return self.call("report")

    def drain_events(self) -> list[Event]:
        return self.call("drain_events")

    def take_usage(self) -> Usage:
        return self.call("take_usage")
