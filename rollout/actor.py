"""The engines that a rollout can be made of, by name; and one as a Ray actor:
`ray.remote(RolloutActor).options(...).remote(path, ...)`, then `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup

import memsaver.compat
from memsaver import MemorySaver
from rollout.actor_base import ActorBase, RankAddress
from rollout.engine import Engine
from rollout.hosted import SglangRollout, VllmRollout
from rollout.protocols import Rollout

_HOSTED: dict[str, Any] = {"vllm": VllmRollout, "sglang": SglangRollout}
KINDS = ("native", *_HOSTED)


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
        threads: int | None = None,
        engine: Mapping[str, Any] = MappingProxyType({}),
        kind: str = "native",
    ) -> None:
        """path: model directory. threads: torch's CPU threads in this process.

        engine: further arguments of `Engine.from_pretrained`. kind: one of `KINDS`.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._device, self._kind = device, kind
        own = {"path": path, "device": device, "dtype": getattr(torch, dtype)}
        self._arguments = {**engine, **own}

    def build(self, address: RankAddress | None = None) -> None:
        """Make the engine. address: this one's among the ranks of a tensor-parallel engine."""
        if self._kind == "vllm":
            # before ranks meet: what it says to NCCL is read once
            memsaver.compat.install("vllm.device_allocator.cumem")
        group = self._join(address, self._device)
        self.held, _ = build_engine(self._kind, self._arguments, group)


def build_engine(
    kind: str, arguments: Mapping[str, Any], group: ProcessGroup | None = None
) -> tuple[Rollout, Callable[[], None]]:
    """Build an engine; return it, and what ends it and gives its memory back.

    arguments: of its class's `from_pretrained`. group: of the ranks that share it; vLLM takes
    torch's default one, SGLang none.
    """
    if kind in _HOSTED:
        if group is not None and kind == "sglang":
            raise ValueError(f"kind={kind} takes one process; use kind=native, or kind=vllm")
        rollout = _HOSTED[kind].from_pretrained(**arguments)
        return rollout, rollout.close
    if kind != "native":
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    saver = MemorySaver(device=torch.device(arguments["device"]))
    try:
        return Engine.from_pretrained(**arguments, saver=saver, group=group), saver.close
    except BaseException:
        saver.close()
        raise
