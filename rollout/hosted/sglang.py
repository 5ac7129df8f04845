"""SGLang as a rollout: it generates, sleeps by tags, and its weights are replaced in place."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch

from memsaver import StateError
from rollout.engine.engine_base import PeerSaver
from rollout.hosted.base import DEFAULT_TOKENS, HostedRollout, Request, require_sampling
from rollout.hosted.sglang_process import Answers, SglangEngine
from rollout.model.hub import resolve_model
from rollout.model.loading import longest_context
from rollout.model.model_folder import load_hf_config, token_ids
from rollout.protocols import ShardedEngine
from rollout.requests import Completion, Progress, SamplingParams, for_each

_OF_A_SHARD = {
    "weight_layout",
    "begin_update",
    "write_update",
    "verify_update",
    "commit_update",
    "alias_update",
    "digest",
    "manifest",
}
"""Methods of `HostedRollout` with a different result on each scheduler."""


class SglangRollout(ShardedEngine):
    """A `Rollout` over SGLang's engine, whose schedulers run in other processes.

    Trainer and cycle use it like an `Engine`; `docs/how-to/sglang.md` lists its limits. All methods
    of `HostedRollout` are available, and run in the process of each scheduler. With `tp_size` above
    1, each scheduler has a shard of the weights, `shards` has one target of a sync per scheduler,
    and methods return the result of rank 0. It is not thread-safe: one call at a time. Seeds have
    no effect unless the engine is built with `enable_deterministic_inference`. Requests that SGLang
    would truncate are refused.
    """

    def __init__(self, engine: SglangEngine, path: str | Path, loaded: bool) -> None:
        """Record where the engine's weights lie.

        Args:
            engine: The engine.
            path: Model directory.
            loaded: Whether the engine has loaded the checkpoint's weights.

        Raises:
            ValueError: Names the first parameter that is not a plain copy of the checkpoint.
        """
        self.engine = engine
        self._stops = token_ids(path).ends
        self.kv_tokens, self._longest = engine.call("build", str(path), loaded)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        kv_tokens: int | None = None,
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
        """Start SGLang's engine for a model.

        Args:
            path: Model directory, or ORG/NAME of the Hub.
            device: The GPU.
            dtype: Dtype of the weights.
            kv_tokens: Tokens in the KV pool; None: 65,536.
            load_weights: False starts with dummy weights, which are undefined until an update
                commits.
            page_size: Tokens per page of the KV pool.
            max_running: Samples in one step.
            max_prefill_tokens: Prompt tokens computed in one step.
            max_context_len: Maximum tokens of prompt and answer together; None: the model's limit.
            cuda_graphs: Decode with CUDA graphs.
            seed: Seed of the engine.
            **options: Further options of `sglang.Engine`. `tp_size` ranks use the GPUs from
                `device` on.

        Raises:
            ValueError: The package is not installed, the device is not a GPU, it has too little
                memory for `kv_tokens`, or the model's weights cannot be updated in place.
            RuntimeError: SGLang's scheduler ended during its start.
        """
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device={device}: SGLang needs a GPU; use engine.kind=native")
        path, kv_tokens = resolve_model(path), kv_tokens or DEFAULT_TOKENS
        if max_context_len is not None:  # SGLang reserves two positions
            max_context_len = min(max_context_len + 2, longest_context(load_hf_config(path)))
        own = {
            "model_path": str(path),
            "dtype": str(dtype).removeprefix("torch."),
            "load_format": "auto" if load_weights else "dummy",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "disable_cuda_graph": not cuda_graphs,
            "disable_prefill_cuda_graph": True,  # SGLang cannot release the memory of such graphs
            "cuda_graph_max_bs_decode": max_running,
            "random_seed": seed,
            "page_size": page_size,
            "max_total_tokens": kv_tokens,
            "mem_fraction_static": 0.9,  # max_total_tokens limits the pool instead
            "max_running_requests": max_running,
            "chunked_prefill_size": max(max_prefill_tokens, page_size),
            "context_length": max_context_len,
            "base_gpu_id": device.index or 0,
            # Its kernels map the memory of captured graphs, which is on tags, by CUDA IPC.
            "disable_custom_all_reduce": options.get("tp_size", 1) > 1,
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

    def submit(self, *_: Any, **__: Any) -> int:
        """Raise a StateError: the schedulers, in their processes, run the steps.

        Raises:
            StateError: Always.
        """
        raise StateError(
            "SGLang steps in its own processes and answers whole calls; use generate, or "
            "engine.kind=native or vllm"
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `params.n` times.

        Args:
            prompts: Token ids.
            params: Sampling parameters, for all prompts or one per prompt.
            on_progress: Callback after every step; it counts tokens of finished samples only.

        Returns:
            The samples, [prompt][sample].

        Raises:
            StateError: Memory or content is missing, see `unavailable_reason`.
            ValueError: The engine does not support the parameters.
            RankError: A rank that shares the model failed or did not answer.
        """
        if reason := self.make_ready():
            raise StateError(f"cannot generate: {reason}")
        each = for_each(prompts, params)
        numbers: list[int] = []  # of the requests' prompts
        requests: list[Request] = []
        for number, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
            prompt_requests = self._requests(prompt, param)
            numbers += [number] * len(prompt_requests)
            requests += prompt_requests
        version, total = self.weights_version, sum(param.n for param in each)
        results: list[list[Completion]] = [[] for _ in requests]

        def collect(answers: Answers) -> None:
            for number, output in answers:
                results[number] = [completion(sample, version) for sample in output]
            if on_progress is not None:
                done = list(chain.from_iterable(results))
                on_progress(len(done), total, sum(len(sample.token_ids) for sample in done))

        self.engine.run([prompts[number] for number in numbers], requests, collect)
        by_prompt: list[list[Completion]] = [[] for _ in prompts]
        for number, samples in zip(numbers, results, strict=True):
            by_prompt[number] += samples
        return by_prompt

    def _requests(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        if len(prompt) + params.max_tokens > self._longest:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed "
                f"SGLang's {self._longest}; build it with a larger max_context_len or kv_tokens"
            )
        return sglang_params(params, self._stops, self.engine.seeded)

    # ---------------------------------------------------------------- in the schedulers

    @property
    def shards(self) -> Sequence[Any]:
        size = self.engine.size
        return [self] if size == 1 else [SglangShard(self.engine, rank) for rank in range(size)]

    def unavailable_reason(self) -> str | None:
        """Return why `generate` would raise a StateError now; None if all schedulers are ready."""
        reasons = self.engine.call_all("unavailable_reason")
        if self.engine.size > 1:
            reasons = [reason and f"rank {rank}: {reason}" for rank, reason in enumerate(reasons)]
        return next(filter(None, reasons), None)

    def served_version(self) -> int | None:
        """Return the version of the weights; None while any scheduler's are undefined."""
        versions = set(self.engine.call_all("served_version"))
        return versions.pop() if len(versions) == 1 else None

    def hand_over_to(self, peer: PeerSaver | None) -> None:
        """Set the receiver of memory that a sleep frees on the device of rank 0."""
        self.engine.call_rank(0, "hand_over_to", peer)

    def __getattr__(self, name: str) -> Any:
        """Return a method that runs on every scheduler, or the value of a property of rank 0.

        The names are those of `HostedRollout`.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        if name in _OF_A_SHARD and self.engine.size > 1:
            raise StateError(
                f"{name}: each of the {self.engine.size} schedulers has a shard of the weights; "
                "use the members of `shards`"
            )
        call = functools.partial(self.engine.call, name)
        return call if callable(getattr(HostedRollout, name)) else call()

    def close(self) -> None:
        """End SGLang's processes, which releases all memory."""
        self.engine.close()


class SglangShard:
    """The weights of one scheduler, an `UpdatableEngine` whose pages a sync writes."""

    def __init__(self, engine: SglangEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank

    def __getattr__(self, name: str) -> Any:
        """Return a method of the scheduler's `HostedRollout`, or the value of a property."""
        if name not in _OF_A_SHARD | {"abort_update", "served_version"}:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        call = functools.partial(self._engine.call_rank, self._rank, name)
        return call if callable(getattr(HostedRollout, name)) else call()


def sglang_params(
    params: SamplingParams, stops: Collection[int], seeded: bool = False
) -> list[Request]:
    """Return the sampling parameters of SGLang's requests for `params.n` samples.

    `stops` are the model's end tokens. If `params` have a seed and the engine is `seeded`, every
    sample gets a request. Otherwise one request covers all samples, and a seed has no effect. A
    ValueError names parameters that SGLang does not support.
    """
    require_sampling(params, "SGLang")
    if params.ignore_eos and params.stop_token_ids:
        raise ValueError(
            "ignore_eos=True: SGLang would ignore stop_token_ids, too; use only one of them"
        )
    if seeded and params.seed is not None:
        single = replace(params, n=1, seed=None)
        seeds = (hash((params.seed, number)) % 2**63 for number in range(params.n))
        return [{**sglang_params(single, stops)[0], "sampling_seed": seed} for seed in seeds]
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
    """Convert one sample's output of `sglang.Engine.async_generate`.

    A ValueError says why SGLang refused the request.
    """
    tokens, info = list(output["output_ids"]), output["meta_info"]
    reason = info["finish_reason"]
    if reason["type"] == "abort":
        raise ValueError(f"SGLang ended a request: {reason.get('message')}")
    return Completion(
        token_ids=tokens,
        logprobs=[float(logprob) for logprob, *_ in info["output_token_logprobs"]],
        finish_reason=reason["type"],
        weight_versions=[version] * len(tokens),
        cached_tokens=info.get("cached_tokens", 0),
    )
