"""Configuration of the tiers below the device pool, validated where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcache.tiers import HostCacheConfig, Layout, WritePolicy, check_policy
from rollout.serving.preemption import Preemption, check_preemption


@dataclass(frozen=True, kw_only=True)
class KVTiers:
    """Says where cached pages go when the device pool is full, and come back from.

    host_ratio: host tokens for a token of the device pool, or host_bytes: the most bytes; exactly
    one of them.
    layout: of the host pages, see HostCacheConfig. write_policy: when a page is copied to the host,
    see `kvcache.tiers`. disk_directory, disk_bytes: where pages go from the host, and the most
    bytes of files; None: no disk. The directory is this engine's alone, and what another one left
    there is deleted.
    preemption: a sample that has to make room is brought back by computing its tokens again
    ("recompute"), by copying its pages to the host and back ("swap"), or whichever is cheaper at
    the rates measured so far ("cheapest").
    keep_asleep: cached pages go to the host before a sleep of the KV cache, and are found again
    afterwards under the same weights; False: they are forgotten.
    """

    host_ratio: float | None = None
    host_bytes: int | None = None
    layout: Layout = "layer_first"
    write_policy: WritePolicy = "write_through"
    disk_directory: str | Path | None = None
    disk_bytes: int | None = None
    preemption: Preemption = "cheapest"
    keep_asleep: bool = True

    def __post_init__(self) -> None:
        _ = self.host  # says what is wrong with it
        check_policy(self.write_policy)
        check_preemption(self.preemption)
        if (self.disk_directory is None) != (self.disk_bytes is None):
            raise ValueError(
                f"give disk_directory and disk_bytes together or neither, got "
                f"{self.disk_directory} and {self.disk_bytes}"
            )

    @property
    def rank_dependent(self) -> bool:
        """Tells whether ranks that get the same requests may come to different decisions, by
        measured times or a disk's faults.
        """
        return self.preemption == "cheapest" or self.disk_directory is not None

    @property
    def host(self) -> HostCacheConfig:
        return HostCacheConfig(
            ratio=self.host_ratio, size_bytes=self.host_bytes, layout=self.layout
        )
