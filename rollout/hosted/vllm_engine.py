"""A `vllm.LLM` in this process with memory on memsaver's tags.

Nothing of vLLM is changed: only public calls are used, and the import name of its allocator.
"""

import atexit
import contextlib
import gc
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

import memsaver.compat
from memsaver import StateError
from memsaver.compat import IN_PROCESS, require
from rollout.hosted.base import HostedEngine, Request
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, WEIGHTS

_SYMMETRIC = "VLLM_ALLREDUCE_USE_SYMM_MEM"
_ALLOCATOR = "vllm.device_allocator.cumem"
# These methods leave the weights where `load_weights` puts them.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")
# vLLM's tags behind each engine tag. "workspace", "cudagraph" and "runtime" are tags of vLLM 0.33.
_BEHIND = {
    WEIGHTS: ("weights",),
    KV_CACHE: ("kv_cache", "workspace"),
    CUDA_GRAPH: ("cudagraph", "runtime"),
}


class VllmWorker(HostedEngine):
    """A worker of vLLM, in the worker's process.

    The worker does not have the prefix cache. Its owner resets the cache after every update.
    """

    name = "vLLM"
    experts_option = "moe_backend"
    graphs_need_content = True

    def __init__(self, worker: Any) -> None:
        """Wrap a worker of an engine with `enable_sleep_mode`.

        A StateError says that its memory is not on memsaver's tags.
        """
        places = importlib.import_module("vllm.device_allocator")
        self.allocator: Any = places.get_mem_allocator_instance()
        if not hasattr(self.allocator, "saver"):
            raise StateError(
                "vLLM uses its own allocator instead of memsaver's tags; start the program with "
                "VLLM_PLUGINS=memsaver"
            )
        self.saver = self.allocator.saver
        self.worker = worker
        self.model = worker.get_model()
        if several_ranks():
            ranks: Any = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
            self.group = ranks.cpu_group if ranks.world_size > 1 else None

    def tags_behind(self, tag: str) -> list[str]:
        return [name for name in _BEHIND[tag] if name in self.saver.tags]

    def is_plain(self, module: nn.Module) -> bool:
        method = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        plain = type(method).__name__ in _PLAIN_METHODS or backend in _PLAIN_EXPERTS
        return (method is None or plain) and type(module).__name__ != "MLAAttention"

    def reset_prefix_cache(self) -> None:
        return

    def refill_kv_state(self) -> None:
        """Rebuild tables of addresses and scales of an fp8 cache, as vLLM does after a wake-up."""
        self.worker.model_runner.post_kv_cache_wake_up()


class VllmEngine(VllmWorker):
    """A `vllm.LLM` whose worker is in this process."""

    def __init__(self, llm: Any) -> None:
        """Wrap a `vllm.LLM` with `enable_sleep_mode`.

        A StateError says that its memory is not on memsaver's tags.
        """
        import vllm

        self.vllm, self.llm = vllm, llm
        super().__init__(llm.collective_rpc(lambda worker: worker)[0])

    @classmethod
    def start(cls, path: str | Path, options: dict[str, Any]) -> Self:
        """Start a `vllm.LLM`. In a group of several ranks, each starts one, on its current GPU.

        `VllmRollout.from_pretrained` documents the errors, and which ranks share an engine.
        """
        require("vllm")
        if os.environ.setdefault(IN_PROCESS, "0") != "0":
            raise StateError(
                f"{IN_PROCESS}={os.environ[IN_PROCESS]} runs vLLM's engine in another process, "
                f"whose weights this process cannot offer; set {IN_PROCESS}=0"
            )
        memsaver.compat.install(_ALLOCATOR)
        import vllm

        with _launched() as more:
            return cls(vllm.LLM(model=str(path), enable_sleep_mode=True, **more, **options))

    def reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise StateError("vLLM's requests use keys of the present weights; let them finish")

    def add(self, id: int, prompt: Sequence[int], fields: Request, stream: bool) -> None:
        """Queue a request; `fields` are those of `vllm.SamplingParams`."""
        kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
        kind = kinds.DELTA if stream else kinds.FINAL_ONLY
        sampling = self.vllm.SamplingParams(output_kind=kind, detokenize=False, **fields)
        tokens = {"type": "token", "prompt_token_ids": list(prompt)}
        self.llm.llm_engine.add_request(str(id), tokens, sampling)

    def step(self) -> list[Any]:
        """Run one step; return vLLM's `RequestOutput`s."""
        return self.llm.llm_engine.step()

    def abort(self, ids: Sequence[int]) -> None:
        """End requests, of which vLLM tells nothing more."""
        self.llm.llm_engine.abort_request(list(map(str, ids)))

    def close(self) -> None:
        """End the engine, and release its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.worker, self.model
        gc.collect()
        self.allocator.release_pools()
        atexit.unregister(self.allocator.release_pools)
        self.saver.close()
        type(self.allocator).instance = None


def several_ranks() -> bool:
    """Return whether this process is in a default group of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def _launched() -> Iterator[dict[str, Any]]:
    """Yield options with which `vllm.LLM` becomes one worker of the default group in the block.

    vLLM reads its rank and its GPU from torchrun's variables, which other launchers do not set. All
    reductions use NCCL: vLLM's own kernels map the memory of the other GPUs, which a Ray actor does
    not see.
    """
    if not several_ranks():
        yield {}
        return
    variables = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(torch.cuda.current_device())}
    variables[_SYMMETRIC] = os.environ.get(_SYMMETRIC, "0")
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield {
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,
        }
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
