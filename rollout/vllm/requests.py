"""Says a request in vLLM's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rollout.types import Completion, SamplingParams

COLDEST = 0.01
"""vLLM raises temperatures between 0 and this one to it."""


def vllm_params(params: SamplingParams, stops: Collection[int]) -> dict[str, Any]:
    """Fields of `vllm.SamplingParams`. stops: the model's own end tokens.

    ValueError for what vLLM's log-probabilities would not be ours of.
    """
    if params.beam_width > 1:
        raise ValueError(f"beam_width={params.beam_width}: no beam search with vLLM; use 1")
    if params.top_k or params.top_p < 1:
        raise ValueError(
            f"top_k={params.top_k}, top_p={params.top_p}: vLLM's log-probabilities would be those "
            f"after the cut, of other tokens than the trainer's; use top_k=0 and top_p=1"
        )
    if 0 < params.temperature < COLDEST:
        raise ValueError(f"temperature={params.temperature}: vLLM takes 0, or {COLDEST} and more")
    return {
        "n": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "stop_token_ids": sorted({*(params.stop_token_ids or ()), *_own(params, stops)}),
        "ignore_eos": True,  # they are all named
        "logprobs": 0,
        "flat_logprobs": True,
    }


def _own(params: SamplingParams, stops: Collection[int]) -> Collection[int]:
    return () if params.ignore_eos else stops


def completions(output: Any, version: int) -> list[Completion]:
    """output: vLLM's `RequestOutput` of a request that has ended."""
    return [
        Completion(
            token_ids=list(answer.token_ids),
            logprobs=list(answer.logprobs.logprobs),
            finish_reason=answer.finish_reason,
            weight_versions=[version] * len(answer.token_ids),
        )
        for answer in sorted(output.outputs, key=lambda each: each.index)
    ]
