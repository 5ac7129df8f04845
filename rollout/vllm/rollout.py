"""vLLM as a rollout: generates, sleeps by tags, and has its weights replaced in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch

from memsaver import StateError
from rollout.hosted import HostedRollout
from rollout.model import stop_token_ids
from rollout.protocols import Progress
from rollout.serving import for_each
from rollout.types import Completion, SamplingParams
from rollout.vllm.engine import VllmEngine
from rollout.vllm.requests import completions, vllm_params


class VllmRollout(HostedRollout):
    """A `Rollout` over vLLM's engine in this process. Not thread-safe: one call at a time.

    It is what `Engine` is to trainer and cycle; `docs/how-to/vllm.md` lists what it refuses.
    """

    def __init__(self, engine: VllmEngine, path: str | Path) -> None:
        """See `HostedRollout`."""
        super().__init__(engine, path)
        self.engine = engine
        self._stops = stop_token_ids(path)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        kv_tokens: int = 65536,
        load_weights: bool = True,
        *,
        page_size: int = 16,
        max_running: int = 256,
        max_prefill_tokens: int = 8192,
        max_context_len: int | None = None,
        cuda_graphs: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """vLLM's engine for a Hugging Face model directory.

        Sizes as in `EngineConfig`; options: further ones of `vllm.LLM`. load_weights: False draws
        dummy ones, undefined until an update commits.
        """
        device = torch.device(device)
        if device.type != "cuda" or device.index:
            raise ValueError(
                f"device={device}: vLLM in this process takes its first GPU; set "
                f"CUDA_VISIBLE_DEVICES, and device=cuda"
            )
        engine = VllmEngine.start(
            path,
            {
                "dtype": str(dtype).removeprefix("torch."),
                "load_format": "auto" if load_weights else "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": not cuda_graphs,
                "seed": seed,
                "block_size": page_size,
                # one block is padding; the count decides, whatever the bytes would be
                "num_gpu_blocks_override": kv_tokens // page_size + 1,
                "kv_cache_memory_bytes": torch.cuda.mem_get_info(device)[1],
                "gpu_memory_utilization": 0.01,
                "max_num_seqs": max_running,
                "max_num_batched_tokens": max(max_prefill_tokens, max_running),
                "max_model_len": max_context_len,
                # temperature is in them, as in our own
                "logprobs_mode": "processed_logprobs",
                **options,
            },
        )
        rollout = cls(engine, path)
        if load_weights:
            rollout.store.define(0)
        return rollout

    # ---------------------------------------------------------------- generate

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt params.n times; result [prompt][sample]. See `Engine.generate`.

        ValueError for what vLLM cannot do with our log-probabilities: beam search, top-k and top-p,
        temperatures between 0 and 0.01.
        """
        if reason := self.unavailable_reason():
            raise StateError(f"cannot generate: {reason}")
        each = for_each(prompts, params)
        asked = [vllm_params(one, self._stops) for one in each]
        found: list[list[Completion]] = [[] for _ in prompts]
        total = sum(one.n for one in each)

        def collect(outputs: list[Any]) -> None:
            for output in outputs:
                found[int(output.request_id)] = completions(output, self.store.last_version)
            if on_progress is not None:
                done = sum(map(len, found))
                answers = chain.from_iterable(found)
                on_progress(done, total, sum(len(one.token_ids) for one in answers))

        self.engine.run(prompts, asked, collect)
        return found

    def close(self) -> None:
        """End vLLM's engine, and give all memory back."""
        self.engine.close()
