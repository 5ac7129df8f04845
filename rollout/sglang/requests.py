"""Says a request in SGLang's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rollout.types import Completion, SamplingParams


def sglang_params(
    params: SamplingParams, stops: Collection[int], seeded: bool = False
) -> list[dict[str, Any]]:
    """Sampling parameters of SGLang's requests for params.n samples.

    stops: the model's own end tokens. seeded: the engine draws by each request's seed, so each
    sample is a request; otherwise seeds are without effect, and it is one for all samples.
    ValueError for what SGLang has no words for.
    """
    if params.beam_width > 1:
        raise ValueError(f"beam_width={params.beam_width}: no beam search with SGLang; use 1")
    if params.ignore_eos and params.stop_token_ids:
        raise ValueError(
            "ignore_eos=True: SGLang would ignore stop_token_ids, too; use one of both"
        )
    if seeded and params.seed is not None:
        one = replace(params, n=1, seed=None)
        seeds = (hash((params.seed, number)) % 2**63 for number in range(params.n))
        return [{**sglang_params(one, stops)[0], "sampling_seed": seed} for seed in seeds]
    return [
        {
            "n": params.n,
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": sorted({*(params.stop_token_ids or ()), *stops}),
        }
    ]


def completion(output: Mapping[str, Any], version: int) -> Completion:
    """output: of one sample, from `sglang.Engine.async_generate`. ValueError where SGLang refused
    it.
    """
    tokens, said = list(output["output_ids"]), output["meta_info"]
    reason = said["finish_reason"]
    if reason["type"] == "abort":
        raise ValueError(f"SGLang ended a request: {reason.get('message')}")
    return Completion(
        token_ids=tokens,
        logprobs=[float(each[0]) for each in said["output_token_logprobs"]],
        finish_reason=reason["type"],
        weight_versions=[version] * len(tokens),
    )
