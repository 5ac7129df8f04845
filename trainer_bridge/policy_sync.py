"""The way of a policy's weights into rollouts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memsaver import MemorySaver
from memsaver.errors import StateError
from memsaver.system.devices import place_of
from rollout.model import stored_buffers
from rollout.protocols import ShardedEngine, UpdatableEngine, sync_targets
from rollout.weights import Manifest
from trainer_bridge.learning.trainer_model import Model
from trainer_bridge.models.adapters.lora import Adapters, base_params
from trainer_bridge.offload import Offloader
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.alias import PageAlias
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync
from trainer_bridge.sync.writer import Shards
from trainer_bridge.tag_names import PARAMS


class AdapterTarget:
    """An adapter of an engine, as the target of a sync: calls name the adapter.

    Args:
        engine: The engine, or a handle on it.
        name: Name under which it serves the adapter.
    """

    def __init__(self, engine: UpdatableEngine, name: str) -> None:
        self._engine, self._name = engine, name

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._engine, method), adapter=self._name)


class PolicySync:
    """The syncs of one rank's policy, by copies or by aliased pages; owned by its trainer.

    Adapters that engines serve beside the base have a sync of their own. The base, which never
    changes, is written only into engines that do not have it.
    """

    def __init__(
        self,
        policy: Model,
        adapters: Adapters | None,
        saver: MemorySaver,
        layout: Manifest | None,
        offloader: Offloader,
    ) -> None:
        """Read the names; `layout` is that of tag `params`, if an engine can alias its pages."""
        self._policy, self._adapters, self._offloader = policy, adapters, offloader
        self._saver, self._layout = saver, layout
        self._params = base_params(policy.module)
        self._buffers = tuple(stored_buffers(policy.module))
        self._shards = Shards(self._named)
        self._sync: WeightSync | None = None
        self._served: WeightSync | None = None  # of adapters beside the base
        self._alias: PageAlias | None = None

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's parameters without adapters, by checkpoint name."""
        tensors = self._tensors()
        return {name: tensors[name] for name in self._params}

    def connect(
        self,
        targets: Sequence[UpdatableEngine | ShardedEngine],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Connect this rank to engines; see `Trainer.connect`."""
        self.close()
        config, agreement = self._policy.config, group_agreement(group or dist.group.WORLD)
        ranks = (config.exact_ranks, config.exact_expert_parallel) if config.exact else None
        shards, place = self._shards.described(), place_of(device)
        self._sync = WeightSync(shards, self._tensors, targets, agreement, place=place, ranks=ranks)
        if self._adapters is not None and (name := self._adapters.served_as) is not None:
            if group is not None:
                rule = "needs engines on the machines of the trainer"
                raise ValueError(f"LoraConfig.served_as={name!r} {rule}; use served_as=None")
            factors = Shards(self._factors)
            engines: Any = [AdapterTarget(target, name) for target in sync_targets(targets)]
            described = factors.described()
            self._served = WeightSync(described, factors.tensors, engines, agreement, place=place)
        if self._layout is not None:
            self._alias = PageAlias(self._saver, PARAMS, self._layout, self._sync)

    def sync(self, version: int, **options: Any) -> SyncReceipt:
        """Write the weights into the engines' pages; see `Trainer.sync_weights`."""
        if self._sync is None:
            rule = "sync_weights() has no rollout"
            raise StateError(f"{rule}; call connect([engine]) first, on every rank")
        if self._adapters is None:
            return self._sync.sync(version, **options)
        if self._served is not None:
            base = None if self._sync.holds() else self._sync.sync(version, **options)
            return _together(base, self._served.sync(version, **options))
        names = self._adapters.names if self._sync.holds() else None
        return self._sync.sync(version, names=names, derived=self._adapters.factors(), **options)

    def alias(self, version: int) -> SyncReceipt:
        """Let the engines serve the trainer's pages; see `Trainer.alias_weights`."""
        if self._alias is None:
            rule = "alias_weights() needs parameters laid out like the rollout's weights"
            remedy = "create the trainer with layout=engine.manifest, and call connect([engine])"
            raise StateError(f"{rule}; {remedy}")
        if self._served is None:
            return self._alias.share(version)
        base = None if self._alias.holds() else self._alias.share(version)
        return _together(base, self._served.sync(version))

    def end(self) -> None:
        """Let engines give aliased pages back, and unmap theirs."""
        if self._alias is not None:
            self._alias.end()
        self.close()

    def close(self) -> None:
        """Unmap the engines' pages."""
        for sync in (self._sync, self._served):
            if sync is not None:
                sync.close()

    def _tensors(self) -> dict[str, Tensor]:
        self._offloader.await_content()
        return self._shards.tensors()

    def _factors(self) -> dict[str, Tensor]:
        assert self._adapters is not None
        self._offloader.await_content()
        return self._adapters.tensors()

    def _named(self) -> dict[str, Tensor]:
        # Parameters keep their objects. A buffer can be replaced, so it is looked up each time.
        return self._params | {name: self._policy.module.get_buffer(name) for name in self._buffers}


def _together(base: SyncReceipt | None, adapter: SyncReceipt) -> SyncReceipt:
    """Return the receipt of an adapter and of the base, if that was written before it."""
    if base is None:
        return adapter
    summed = "seconds", "verify_seconds", "nbytes", "link_bytes", "node_bytes", "copy_seconds"
    sums = {name: getattr(base, name) + getattr(adapter, name) for name in summed}
    stages = Counter(base.stages)
    stages.update(adapter.stages)
    return replace(adapter, digests=base.digests + adapter.digests, stages=dict(stages), **sums)
