"""The engines that a rollout can be made of, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from memsaver import MemorySaver
from rollout.engine import Engine
from rollout.protocols import Rollout

KINDS = ("native", "vllm", "sglang")


def build_engine(
    kind: str,
    arguments: Mapping[str, Any],
    *,
    group: ProcessGroup | None = None,
    limit_bytes: int | None = None,
) -> tuple[Rollout, Callable[[], None]]:
    """An engine, and what ends it and gives its memory back.

    arguments: of its class's `from_pretrained`. group: of the ranks that share it; vLLM takes
    torch's default one, SGLang none. limit_bytes: of the native engine's saver.
    """
    if kind in ("vllm", "sglang"):
        if limit_bytes is not None:
            raise ValueError(f"kind={kind} takes no limit_bytes; use kind=native")
        if group is not None and kind == "sglang":
            raise ValueError(f"kind={kind} takes one process; use kind=native, or kind=vllm")
        rollout = _hosted(kind).from_pretrained(**arguments)
        return rollout, rollout.close
    if kind != "native":
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    saver = MemorySaver(device=torch.device(arguments["device"]), limit_bytes=limit_bytes)
    try:
        return Engine.from_pretrained(**arguments, saver=saver, group=group), saver.close
    except BaseException:
        saver.close()
        raise


def _hosted(kind: str) -> Any:
    """The class of an engine that is another project's."""
    if kind == "vllm":
        from rollout.vllm import VllmRollout

        return VllmRollout
    from rollout.sglang import SglangRollout

    return SglangRollout
