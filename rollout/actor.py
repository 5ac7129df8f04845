"""The engine as a Ray actor: `RolloutActor.options(...).remote(path, ...)`, then `build`."""

from typing import Any

import ray
import torch

import memsaver.compat
from rollout.actor_base import ActorBase, Seat
from rollout.engines import build_engine
from rollout.protocols import Rollout


@ray.remote
class RolloutActor(ActorBase):
    """An engine in a process of its own: `actor.call.remote("generate", prompts, params)`.

    It takes one call at a time. What a call passes is pickled, callbacks run in the actor.
    """

    held: Rollout

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        kv_tokens: int = 4096,
        load_weights: bool = True,
        limit_bytes: int | None = None,
        threads: int | None = None,
        engine: dict[str, Any] | None = None,
        kind: str = "native",
    ) -> None:
        """path: model directory. threads: torch's CPU threads in this process.

        engine: further EngineConfig fields. kind: which engine (`rollout.engines`).
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._device, self._kind = device, kind
        self._limit_bytes = limit_bytes
        self._arguments = {"kv_tokens": kv_tokens, "load_weights": load_weights, **(engine or {})}
        self._arguments |= {"path": path, "device": device, "dtype": getattr(torch, dtype)}

    def build(self, seat: Seat | None = None) -> None:
        """Make the engine. seat: this one's among the ranks of a tensor-parallel engine."""
        if self._kind == "vllm":
            # before ranks meet: what it says to NCCL is read once
            memsaver.compat.install("vllm.device_allocator.cumem")
        group = self._join(seat, self._device)
        self.held, _ = build_engine(
            self._kind, self._arguments, group=group, limit_bytes=self._limit_bytes
        )
