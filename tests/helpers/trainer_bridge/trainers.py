"""Trainer ranks as processes, which sync random shards into engines of the test's process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.protocols import UpdatableEngine
from tests.helpers.peers import Peer, server
from tests.helpers.trainer_bridge.sync_hooks import HookedAgreement, half_written
from tests.helpers.trainer_bridge.three_params import shards_of
from trainer_bridge.sync.weight_sync import WeightSync

PATIENCE = 20.0  # seconds that ranks wait for each other if none dies
Shapes = Mapping[str, tuple[int, ...]]
# Methods of an engine, and the stages in which a sync calls them.
_CALLS = {"begin_update": "open", "verify_update": "verify", "commit_update": "commit"}


@dataclass(frozen=True, kw_only=True)
class Death:
    """The stage and moment (`sync_hooks.py`) at which a rank kills itself."""

    stage: str
    moment: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """One sync.

    Attributes:
        version: Version of the weights.
        seed: Seed of the weights (`weights`).
        timeout: Seconds to wait for the other ranks in a stage.
        shadow: Whether it is a shadow update.
        death: When the rank kills itself; None for never.
    """

    version: int
    seed: int
    timeout: float = PATIENCE
    shadow: bool = False
    death: Death | None = None


def weights(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Return whole random fp32 parameters.

    They are large, so that greedy choices are never near ties. A norm's gain is about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in sorted(shapes.items())
    }
    return {name: value + 1 if "norm" in name else value for name, value in noise.items()}


class TrainerRank(Peer):
    """A rank in its own process, whose target is in this process.

    A thread of this process calls the target for the rank, holding `lock`. The rank answers None
    when it is connected, and each `Order` with a SyncReceipt or the exception of its sync.
    """

    def __init__(self, target: UpdatableEngine, lock: threading.Lock, **setting: Any) -> None:
        """Start the rank with the arguments `setting` of `_Trainer`."""
        calls, remote = server.Pipe()
        super().__init__(_trainer, remote, setting)
        remote.close()
        self._served = threading.Thread(target=serve, args=(calls, target, lock), daemon=True)
        self._served.start()

    def end(self) -> None:
        """Close the pipe, and wait until the rank and its target's thread have ended."""
        self.pipe.close()
        assert self.dies_within(30)
        self._served.join(30)
        assert not self._served.is_alive(), "the target's thread hangs"
        self.process.close()


def serve(calls: Connection, target: UpdatableEngine, lock: threading.Lock) -> None:
    """Call the target for the rank, until the rank has ended."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, args, kwargs = calls.recv()
            answer: Any
            try:
                with lock:
                    answer = getattr(target, name)(*args, **kwargs)
            except Exception as error:
                answer = error
            calls.send(answer)
    calls.close()


def _trainer(pipe: Connection, calls: Connection, setting: dict[str, Any]) -> None:
    rank = _Trainer(calls, **setting)
    pipe.send(None)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            pipe.send(rank.run(pipe.recv()))


class _Trainer:
    def __init__(
        self,
        calls: Connection,
        *,
        rank: int,
        size: int,
        port: int,
        prefix: str,
        shapes: Shapes,
        place: str,
    ) -> None:
        """Connect the rank.

        Args:
            calls: Connection to the target.
            rank: This rank.
            size: Number of ranks.
            port: Port of a store that outlives the trainers.
            prefix: Prefix of this set of ranks in the store.
            shapes: Shapes of the parameters.
            place: Place of this rank's device.
        """
        self._shapes = shapes
        self._death: Death | None = None
        whole = weights(shapes, 0)
        self._shards = [shard for shard in shards_of(shapes, size) if shard.rank == rank]
        self._sources = {shard.name: _part(shard, whole) for shard in self._shards}
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
        self._agreement = HookedAgreement(
            store, rank, size, timeout=PATIENCE, hook=self._die_if_due
        )
        target: Any = _RemoteTarget(calls, self._die_if_due)
        self._sync = WeightSync(self._shards, self._asked, [target], self._agreement, place=place)

    def run(self, order: Order) -> Any:
        """Sync, and return the receipt or the exception."""
        whole = weights(self._shapes, order.seed)
        for shard in self._shards:
            self._sources[shard.name].copy_(_part(shard, whole))
        self._death, self._agreement.timeout = order.death, order.timeout
        try:
            with half_written(lambda: self._die_if_due("write", "inside")):
                return self._sync.sync(order.version, shadow=order.shadow)
        except Exception as error:
            return error

    def _asked(self) -> Mapping[str, Tensor]:
        self._die_if_due("prepare", "inside")
        return self._sources

    def _die_if_due(self, stage: str, moment: str) -> None:
        if self._death is not None and (self._death.stage, self._death.moment) == (stage, moment):
            os.kill(os.getpid(), signal.SIGKILL)


class _RemoteTarget:
    """A handle on an `UpdatableEngine` in the test's process."""

    def __init__(self, calls: Connection, at: Any) -> None:
        self._calls = calls
        self._at = at

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.send((name, args, kwargs))
            if name in _CALLS:
                self._at(_CALLS[name], "inside")  # the engine runs the call even if the rank dies
            answer = self._calls.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def _part(shard: Any, whole: Mapping[str, Tensor]) -> Tensor:
    first, size = shard.start[0], shard.shape[0]
    return whole[shard.name][first : first + size].clone()
