"""Stand-in for vLLM as TRL uses it: weights that load and sleep, and answers without a model."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig

from tests.helpers.rollout.fused import FusedEngine
from vllm import device_allocator
from vllm.distributed import parallel_state


class SamplingParams(SimpleNamespace):
    pass


class RequestOutput(SimpleNamespace):
    pass


class LLM:
    """Stand-in for `vllm.LLM`.

    Attributes:
        calls: The calls of its sleep mode and of `generate`, in order.
        address: RANK and LOCAL_RANK of the external launcher.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.options, self.calls = options, list[Any]()
        config, group = AutoConfig.from_pretrained(model), None
        if options.get("distributed_executor_backend") == "external_launcher":
            self.address = os.environ["RANK"], os.environ["LOCAL_RANK"]
            if dist.is_initialized():
                parallel_state.share_engines(options["tensor_parallel_size"])
                ranks = parallel_state.get_tp_group()
                group = ranks.cpu_group if ranks.world_size > 1 else None
        self.fused = FusedEngine(config, "cpu", normed=False, biased=True, group=group)
        device_allocator.instance = SimpleNamespace(saver=self.fused.saver)
        refill = self.fused.refill_kv_state
        runner = SimpleNamespace(model=self.fused.model, post_kv_cache_wake_up=refill)
        self.worker = SimpleNamespace(get_model=lambda: self.fused.model, model_runner=runner)
        driver = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=driver))

    def collective_rpc(self, method: Any) -> list[Any]:
        return [method(self.worker)]

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))
        self.fused.saver.pause(*self.fused.saver.tags, content="discard")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", *(tags or ())))
        chosen = [tag for tag in tags or self.fused.saver.tags if self.fused.saver.is_paused(tag)]
        if chosen:
            self.fused.saver.resume(*chosen)

    def reset_prefix_cache(self) -> bool:
        self.fused.reset_prefix_cache()
        return True

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool = True) -> list[Any]:
        """Answer each prompt with token 7."""
        if any(map(self.fused.saver.is_paused, self.fused.saver.tags)):
            raise RuntimeError("generate while asleep")
        self.calls.append("generate")
        logprobs = [{7: SimpleNamespace(logprob=-1.5, rank=1)}]
        answer = SimpleNamespace(token_ids=[7], logprobs=logprobs)
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        return [SimpleNamespace(prompt_token_ids=prompt, outputs=[answer]) for prompt in ids]
