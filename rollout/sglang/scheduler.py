"""Puts into SGLang's scheduler, the process that has the weights, our tags, and answers to the
rollout in the process that asks.

SGLang starts it by `Engine.run_scheduler_process_func`, and calls `Scheduler.answer_memsaver` for
`collective_rpc`, between two steps. Both are its own ways in; nothing of it is changed.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor, nn

import memsaver.compat
from memsaver import MemorySaver, StateError
from rollout.actor_base import ActorBase
from rollout.hosted import HostedRollout

ANSWER = "answer_memsaver"
_SCHEDULER = "sglang.srt.managers.scheduler"
# they leave the weights where `load_weights` puts them
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS = "UnquantizedFusedMoEMethod"
_REPACKING = ("use_flashinfer_trtllm_moe", "use_triton_kernels")


def run_scheduler(channel: Connection, *args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`, with its memory on tags and an ear on `channel`."""
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    memsaver.compat.hook_sglang()
    module = importlib.import_module(_SCHEDULER)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    own = answering(module.Scheduler, channel)
    hooks.HookRegistry.register(f"{_SCHEDULER}.Scheduler", own, hooks.HookType.REPLACE)
    module.run_scheduler_process(*args, **kwargs)


def answering(scheduler: type, channel: Connection) -> type:
    """SGLang's class of schedulers, with a method that answers one call from `channel`."""

    def answer_memsaver(self: Any) -> None:
        if not hasattr(self, "memsaver_side"):
            self.memsaver_side = SchedulerSide(self)
        answer(self.memsaver_side, channel)

    return type("Scheduler", (scheduler,), {ANSWER: answer_memsaver})


def answer(side: ActorBase, channel: Connection) -> None:
    """Answers the (method, args, kwargs) that has come with (True, answer) or (False, error)."""
    method, args, kwargs = pickle.loads(channel.recv_bytes())
    try:
        said = True, side.call(method, *args, **kwargs)
    except Exception as error:
        said = False, error
    channel.send_bytes(pickle.dumps(said))


class SchedulerSide(ActorBase):
    """Holds a `HostedRollout` over the scheduler's model, from `build` on."""

    held: HostedRollout

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def build(self, path: str, loaded: bool) -> None:
        """loaded: the weights are the checkpoint's at `path`. See `HostedRollout`."""
        self.held = HostedRollout(HostedScheduler(self._scheduler), path)
        if loaded:
            self.held.store.define(0)

    def is_idle(self) -> bool:
        return bool(self._scheduler.is_fully_idle())

    def limits(self) -> tuple[int, int]:
        """Tokens of the KV cache, and of the longest prompt and answer together."""
        return self._scheduler.max_total_num_tokens, self._scheduler.max_req_len - 1


class HostedScheduler:
    """SGLang's scheduler as a `HostedEngine`."""

    name = "SGLang"
    group = None

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        adapter = scheduler.memory_saver_adapter
        if not isinstance(saver := getattr(adapter, "saver", None), MemorySaver):
            raise StateError(
                f"SGLang's memory is {type(adapter).__name__}'s, not on our tags; pass "
                "enable_memory_saver=True, and let no other plugin replace its adapter"
            )
        self.saver: MemorySaver = saver

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self._scheduler.tp_worker.model_runner.model
        return model

    def tags_behind(self, tag: str) -> list[str]:
        """Returns the saver's tags that one of ours is: one for each content."""
        return [name for name in self.saver.tags if name.rpartition(":")[0] == tag]

    def check_plain(self) -> None:
        """ValueError naming a layer that repacks its weights, or computes with copies of them."""
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            kind = type(method).__name__
            repacks = any(getattr(method, each, False) for each in _REPACKING)
            plain = kind in _PLAIN_METHODS or (kind == _EXPERTS and not repacks)
            if method is not None and not plain:
                raise ValueError(
                    f"{name}: {kind} repacks its weights after loading; use unquantised ones, and "
                    "moe_runner_backend='triton' for experts"
                )
            if hasattr(module, "w_kc"):
                raise ValueError(
                    f"{name}: SGLang computes latent attention with copies of its weights, which "
                    "would stay old; use engine.kind=native"
                )

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The model's own loader."""
        self._scheduler.tp_worker.model_runner.model.load_weights(tensors)

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values; StateError while a request holds some."""
        if not self._scheduler.flush_cache(empty_cache=False):
            raise StateError("SGLang's requests hold keys of the present weights; let them finish")

    def refill_kv_state(self) -> None:
        """SGLang keeps nothing beside its KV cache but what a request writes."""
