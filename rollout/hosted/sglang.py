"""SGLang as a rollout: generates, sleeps by tags, and has its weights replaced in place."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from rollout.hosted.base import Generating, HostedRollout, Request
from rollout.hosted.sglang_process import SglangEngine
from rollout.model.loading import resolve_model, stop_token_ids
from rollout.requests import Completion, SamplingParams


class SglangRollout(Generating):
    """A `Rollout` over SGLang's engine, whose scheduler is a process of its own. Not thread-safe:
    one call at a time.

    It is what `Engine` is to trainer and cycle; `docs/how-to/sglang.md` lists what it refuses. All
    methods of `HostedRollout` are here. Seeds are without effect unless the engine was made with
    `enable_deterministic_inference`; requests that SGLang would cut short are refused.
    """

    def __init__(self, engine: SglangEngine, path: str | Path, loaded: bool) -> None:
        """path: the model's directory. loaded: the engine has its weights. ValueError where the
        model's weights are not plain copies of a checkpoint's; names the first that is not.
        """
        self.engine = engine
        self._stops = stop_token_ids(path)
        self.kv_tokens, self._longest = engine.call("build", str(path), loaded)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        kv_tokens: int = 65536,
        load_weights: bool = True,
        *,
        page_size: int = 1,
        max_running: int = 256,
        max_prefill_tokens: int = 8192,
        max_context_len: int | None = None,
        cuda_graphs: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """SGLang's engine for a model directory, or ORG/NAME of the Hub.

        Sizes as in `EngineConfig`; options: further ones of `sglang.Engine`. load_weights: False
        draws dummy ones, undefined until an update commits. ValueError where there is no room for
        so many tokens.
        """
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device={device}: SGLang needs a GPU; use engine.kind=native")
        path = resolve_model(path)
        described = json.loads((path / "config.json").read_text())
        if max_context_len is not None:  # it keeps two of them for itself
            most = described.get("max_position_embeddings", max_context_len)
            max_context_len = min(max_context_len + 2, most)
        own = {
            "model_path": str(path),
            "dtype": str(dtype).removeprefix("torch."),
            "load_format": "auto" if load_weights else "dummy",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "disable_cuda_graph": not cuda_graphs,
            "disable_prefill_cuda_graph": True,  # SGLang has none whose memory can leave
            "cuda_graph_max_bs_decode": max_running,
            "random_seed": seed,
            "page_size": page_size,
            "max_total_tokens": kv_tokens,
            "mem_fraction_static": 0.9,  # the count decides
            "max_running_requests": max_running,
            "chunked_prefill_size": max(max_prefill_tokens, page_size),
            "context_length": max_context_len,
            "base_gpu_id": device.index or 0,
        }
        engine = SglangEngine(own | options)
        try:
            rollout = cls(engine, path, load_weights)
            if rollout.kv_tokens < kv_tokens:
                raise ValueError(
                    f"kv_tokens={kv_tokens}: SGLang has room for {rollout.kv_tokens}; lower it, or "
                    "free memory of the device first"
                )
        except BaseException:
            engine.close()
            raise
        return rollout

    # ---------------------------------------------------------------- generate

    def requests(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        if len(prompt) + params.max_tokens > self._longest:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed "
                f"SGLang's {self._longest}; make it with a larger max_context_len or kv_tokens"
            )
        return sglang_params(params, self._stops, self.engine.seeded)

    def completions(self, output: Any, version: int) -> list[Completion]:
        return [completion(sample, version) for sample in output]

    # ---------------------------------------------------------------- in the scheduler

    def __getattr__(self, name: str) -> Any:
        """Return what a `HostedRollout` has from the scheduler, where the weights are."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        call = functools.partial(self.engine.call, name)
        return call if callable(getattr(HostedRollout, name)) else call()

    def close(self) -> None:
        """End SGLang's processes, and give all memory back."""
        self.engine.close()


def sglang_params(
    params: SamplingParams, stops: Collection[int], seeded: bool = False
) -> list[Request]:
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
