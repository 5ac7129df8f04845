"""Build an engine by the name of its kind, in this process or in a Ray actor.

An actor is started by `ray.remote(RolloutActor).options(...).remote(path, ...)`, then by `build`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

import memsaver.compat
from memsaver import MemorySaver
from rollout.engine.engine import Engine
from rollout.hosted import SglangRollout, VllmRollout
from rollout.loop.loop_actor import LoopActor
from rollout.process_group import RankAddress
from rollout.protocols import Rollout

EngineKind = Literal["native", "vllm", "sglang"]
_HOSTED: dict[str, Any] = {"vllm": VllmRollout, "sglang": SglangRollout}
KINDS = ("native", *_HOSTED)


class RolloutActor(LoopActor):
    """An engine in its own process, called by `actor.call.remote("generate", prompts, params)`.

    With `max_concurrency` among Ray's options, the actor takes several calls at once (`LoopActor`).
    Arguments are pickled. Of the ranks of a tensor-parallel engine, the first generates, and the
    others `follow`.
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
        kind: EngineKind = "native",
    ) -> None:
        """Store the arguments of the engine, which `build` starts.

        `dtype` names the torch dtype in which the model computes. `threads` sets torch's CPU
        threads in this process; None keeps torch's default. `engine` has further arguments of the
        engine's `from_pretrained`.
        """
        super().__init__()
        if threads is not None:
            torch.set_num_threads(threads)
        self._device, self._kind = device, kind
        own = {"path": path, "device": device, "dtype": getattr(torch, dtype)}
        self._arguments = {**engine, **own}

    def build(self, address: RankAddress | None = None) -> None:
        """Build the engine; with an address, as one rank of a tensor-parallel engine."""
        if self._kind == "vllm":
            # This sets an option of NCCL, which NCCL reads only once, when the ranks meet.
            memsaver.compat.install("vllm.device_allocator.cumem")
        self.held, _ = build_engine(self._kind, self._arguments, self._join(address, self._device))
        self.own()


def build_engine(
    kind: EngineKind, arguments: Mapping[str, Any], group: ProcessGroup | None = None
) -> tuple[Rollout, Callable[[], None]]:
    """Build an engine, and return it with the function that ends it and releases its memory.

    `arguments` are those of the `from_pretrained` of its class. `group` has the ranks that share a
    native engine. vLLM uses torch's default group instead, and SGLang runs in one process.
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
