"""Targets of a sync that have pages but no engine, and ranks that are threads of this process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memsaver
from memsaver.system.devices import place_of
from rollout.weights import (
    Manifest,
    PackedBox,
    ParamSlice,
    UpdateReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
    torch_dtype,
)
from rollout.weights.update import write_boxes
from tests.helpers.trainer_bridge.layouts import digest_of
from trainer_bridge.sync.agree import Agreement
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.weight_sync import WeightSync
from trainer_bridge.sync.writer import LowRank

UNTOUCHED = 0xA5


class PageTarget:
    """A tag of a saver, filled with a pattern, with the contract of an `UpdatableEngine`.

    Attributes:
        fail_at: Stage in which it raises; None for none.
        only: Parameters that the next sync must name.
    """

    def __init__(self, layout: Manifest, device: str = "cpu", place: str = "") -> None:
        self.saver = memsaver.MemorySaver(device=device)
        self.arena = self.saver.empty((layout.nbytes,), torch.uint8, tag="weights").fill_(UNTOUCHED)
        self.layout = layout
        self.place = place or place_of(torch.device(device))
        self.version: int | None = 0
        self.reason = ""
        self.state = "closed"
        self.messages: list[int] = []  # bytes of each message
        self.fail_at: str | None = None
        self.only: tuple[str, ...] | None = None

    def weight_layout(self) -> WeightLayout:
        return WeightLayout(manifest=self.layout, place=self.place)

    def begin_update(self, version: int, *, shadow: bool = False, names: Any = None) -> WeightOffer:
        self._at("begin")
        assert names == self.only
        self.version, self.reason, self.state = None, "begun", "open"
        ticket = self.saver.share("weights", writable=True)
        layout = {"layout_hash": self.layout.layout_hash, "nbytes": self.layout.nbytes}
        return WeightOffer(version=version, ticket=ticket, **layout)  # type: ignore[arg-type]

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        self._at("write")
        assert self.state == "open"
        self.messages.append(data.numel())
        write_boxes(self.arena, boxes, data)

    def verify_update(self, receipt: WriteReceipt) -> UpdateReceipt:
        self._at("verify")
        assert self.state == "open"
        read = self.digest()
        if receipt.digest != read:
            raise ValueError(f"digest {receipt.digest} is {read} here")
        assert receipt.nbytes == sum(self.read(i).nbytes for i, _ in self.meant())
        self.state = "verified"
        return UpdateReceipt(version=receipt.version, digest=read, seconds=0.0)

    def commit_update(self, version: int) -> UpdateReceipt:
        self._at("commit")
        assert self.state == "verified", self.state
        self.version, self.state = version, "closed"
        return UpdateReceipt(version=version, digest=0, seconds=0.0)

    def abort_update(self, reason: str) -> None:
        self.version, self.reason, self.state = None, reason, "closed"

    def read(self, number: int) -> Tensor:
        """Return a view of a slice's stored elements."""
        p = self.layout.slices[number]
        dtype = torch_dtype(p.dtype)
        strides = p.strides or tuple(torch.empty(p.shape, device="meta").stride())
        whole = self.arena.numel() // dtype.itemsize * dtype.itemsize
        return (
            self.arena[:whole].view(dtype).as_strided(p.shape, strides, p.offset // dtype.itemsize)
        )

    def digest(self) -> int:
        """Compute the digest of the named slices by its definition."""
        return sum(digest_of(p, self.read(number)) for number, p in self.meant()) % 2**64

    def meant(self) -> list[tuple[int, ParamSlice]]:
        return [
            (i, p)
            for i, p in enumerate(self.layout.slices)
            if self.only is None or p.name in self.only
        ]

    def untouched(self) -> bool:
        return bool((self.arena == UNTOUCHED).all())

    def leases(self) -> int:
        return self.saver.report().tags["weights"].leases

    def _at(self, stage: str) -> None:
        if self.fail_at == stage:
            raise OSError(f"cosmic ray in {stage}")


@dataclasses.dataclass
class Rank:
    """The state of one trainer rank; `in_ranks` sets `sync` and `agreement`."""

    sources: Mapping[str, Tensor]
    targets: Sequence[Any] = ()
    place: str = "here"
    derived: Mapping[str, LowRank] = dataclasses.field(default_factory=dict)
    sync: WeightSync | None = None
    agreement: Any = None


def in_threads(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Call `run(number)` in `count` threads; return each thread's result or exception."""
    results: list[Any] = [None] * count

    def body(number: int) -> None:
        try:
            results[number] = run(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def in_ranks(
    ranks: Sequence[Rank],
    run: Callable[[int, Rank], Any],
    shards: Sequence[SourceShard],
    timeout: float,
    agreement: Callable[..., Agreement],
) -> list[Any]:
    """Connect all ranks by `agreement`, and call `run(number, rank)` on each.

    Returns:
        The result or exception of each rank.
    """
    store = dist.PrefixStore(f"{id(run)}", dist.HashStore())

    def body(number: int) -> Any:
        rank = ranks[number]
        rank.agreement = agreement(store, number, len(ranks), timeout=timeout)
        rank.sync = WeightSync(
            [shard for shard in shards if shard.rank == number],
            lambda: rank.sources,
            rank.targets,
            rank.agreement,
            place=rank.place,
        )
        return run(number, rank)

    return in_threads(len(ranks), body)
