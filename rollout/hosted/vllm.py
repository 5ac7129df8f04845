"""vLLM as a rollout: it generates, sleeps by tags, and its weights are replaced in place."""

import random
from collections.abc import Collection, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from memsaver import StateError
from rollout.engine.stepping import SteppedEngine
from rollout.hosted.base import DEFAULT_TOKENS, HostedRollout, Request, require_sampling
from rollout.hosted.vllm_engine import VllmEngine, several_ranks
from rollout.model.hub import resolve_model
from rollout.model.model_folder import token_ids
from rollout.parallel import TensorParallel
from rollout.requests import Output, SamplingParams, not_token_ids


class VllmRollout(HostedRollout, SteppedEngine):
    """A `Rollout` over vLLM's engine in this process.

    Trainer and cycle use it like an `Engine`; `docs/how-to/vllm.md` lists its limits. It is not
    thread-safe: one call at a time. Of ranks that share an engine, the first generates, and the
    others `follow`. `generate` refuses parameters for which vLLM's log-probs would differ from ours
    (beam search, top-k, top-p, temperatures between 0 and 0.01).
    """

    def __init__(self, engine: VllmEngine, path: str | Path, seed: int = 0) -> None:
        """Record where the engine's weights lie, see `HostedRollout`.

        Args:
            engine: The engine.
            path: Model directory.
            seed: Seed of requests without a seed, if ranks share the engine.
        """
        super().__init__(engine, path)
        self.engine = engine
        self._stops = token_ids(path).ends
        self._ids = count()
        self._open: dict[int, set[int]] = {}  # samples that have not ended, by request
        self._aborted: list[Output] = []  # ends that are not told yet
        self._seeds = random.Random(seed)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        kv_tokens: int | None = None,
        load_weights: bool = True,
        *,
        page_size: int = 16,
        max_running: int = 256,
        max_prefill_tokens: int = 8192,
        max_context_len: int | None = None,
        cuda_graphs: bool = True,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> Self:
        """Start vLLM's engine for a model.

        In a torch.distributed group of several ranks, all ranks call this, each with its own GPU.
        Every `tensor_parallel_size` consecutive ranks share an engine, and the engines are
        replicas.

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
            tensor_parallel_size: Number of ranks that share an engine.
            **options: Further options of `vllm.LLM`.

        Raises:
            ValueError: The package is not installed, the ranks ask for different engines, the
                device does not fit, or the model's weights cannot be updated in place.
            StateError: vLLM's own allocator is in use already, or the environment runs vLLM's
                engine in another process.
        """
        device, path = torch.device(device), resolve_model(path)
        chosen = {
            "dtype": str(dtype).removeprefix("torch."),
            "load_format": "auto" if load_weights else "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": not cuda_graphs,
            "tensor_parallel_size": tensor_parallel_size,
            "block_size": page_size,
            # One block is padding. This count overrides the number that vLLM derives from bytes.
            "num_gpu_blocks_override": (kv_tokens or DEFAULT_TOKENS) // page_size + 1,
            "gpu_memory_utilization": 0.01,
            "max_num_seqs": max_running,
            "max_num_batched_tokens": max(max_prefill_tokens, max_running),
            "max_model_len": max_context_len,
            # With the temperature applied, as in our own log-probs.
            "logprobs_mode": "processed_logprobs",
            **options,
        }
        described = f"{path} {seed} {chosen}"
        seed = (seed + _replica_number(device, tensor_parallel_size, described)) % 2**63
        room = torch.cuda.mem_get_info(device)[1]
        engine = VllmEngine.start(path, {"seed": seed, "kv_cache_memory_bytes": room, **chosen})
        rollout = cls(engine, path, seed)
        if load_weights:
            rollout.store.define(0)
        return rollout

    # ---------------------------------------------------------------- requests and steps

    @property
    def unfinished(self) -> list[int]:
        """Return the numbers of the requests whose last outputs `step` has not returned."""
        return list(self._open)

    def _check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        if not isinstance(prompt, Sized):
            raise not_token_ids(name)
        vllm_params(params, self._stops)

    def _enqueue(self, prompt: Sequence[int], params: SamplingParams, stream: bool) -> int:
        id, fields = next(self._ids), vllm_params(params, self._stops)
        self.engine.add(id, prompt, fields, stream)
        self._open[id] = set(range(params.n))
        return id

    def _abort(self, ids: Sequence[int]) -> None:
        """End requests. vLLM does not tell the tokens of those that are not streamed."""
        self.engine.abort(ids)
        for id in ids:
            ended = [Output(id, index, [], [], [], "abort") for index in self._open.pop(id, ())]
            self._aborted += ended

    def _drop(self, ids: Sequence[int]) -> None:
        self.engine.abort(ids)
        for id in ids:
            self._open.pop(id, None)

    def _requeue(self) -> None:
        raise StateError("vLLM cannot start requests over; pause with keep, abort or wait")

    def _advance(self) -> list[Output]:
        if self._aborted or not self._open:
            aborted, self._aborted = self._aborted, []
            return aborted
        if reason := self.make_ready():
            raise StateError(f"cannot generate: {reason}")
        try:
            with self._in_step():
                results = self.engine.step()
            self._require_undisturbed()
        except BaseException as error:
            self._ranks.fail(error)
            raise
        outputs = list(chain.from_iterable(map(self._told, results)))
        for output in outputs:
            if output.finish_reason is not None:
                self._open[output.id].discard(output.sample)
                if not self._open[output.id]:
                    del self._open[output.id]
        return outputs

    def _told(self, result: Any) -> Iterator[Output]:
        """Yield what vLLM's output tells of each sample of a request."""
        for sample in sorted(result.outputs, key=lambda sample: sample.index):
            tokens, logprobs = list(sample.token_ids), list(sample.logprobs.logprobs)
            versions = [self.weights_version] * len(tokens)
            id, reason = int(result.request_id), sample.finish_reason
            cached = result.num_cached_tokens or 0
            yield Output(id, sample.index, tokens, logprobs, versions, reason, cached_tokens=cached)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Give ranks that share an engine the same random numbers in a step.

        Every rank schedules and samples on its own, and all ranks wait for each other in every
        layer.
        """
        if self._ranks.size == 1:
            yield
            return
        with drawn_from(self._seeds.getrandbits(63), self.saver.device):
            yield

    def close(self) -> None:
        """End vLLM's engine, and release all memory."""
        self.engine.close()


def _replica_number(device: torch.device, size: int, options: str) -> int:
    """Select the rank's GPU as the current device, and return the number of its replica.

    `size` is the number of ranks of an engine. `options` describes the engine, and must be the same
    on all ranks.
    """
    if not several_ranks():
        if device.type != "cuda" or device.index:
            raise ValueError(
                f"device={device}: vLLM in this process uses its first GPU; set "
                f"CUDA_VISIBLE_DEVICES, and use device=cuda"
            )
        if size > 1:
            raise ValueError(
                f"tensor_parallel_size={size} needs a process per rank in one torch.distributed "
                f"group; start them with torchrun, or with open_ray"
            )
        return 0
    ranks = dist.get_world_size()
    if device.type != "cuda" or ranks % size:
        raise ValueError(
            f"device={device}, tensor_parallel_size={size}: each of the {ranks} ranks needs a GPU, "
            f"and engines are of equal size; use cuda:N, and a size that divides {ranks}"
        )
    if device.index is not None:
        torch.cuda.set_device(device)
    TensorParallel(ranks, dist.group.WORLD).check_same("the model or an option of vLLM", options)
    return dist.get_rank() // size


@contextmanager
def drawn_from(seed: int, device: torch.device) -> Iterator[None]:
    """Set torch's and NumPy's global generators to a seed in the block; restore them afterwards.

    vLLM 0.24 samples requests without a seed from these generators: one of its runners draws from
    torch's, the other takes seeds from NumPy's. Without this, ranks would differ as soon as a
    trainer in one of the processes has drawn from the same generators.
    """
    before = np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            np.random.set_state(before)


COLDEST = 0.01
"""Lowest temperature above 0; vLLM raises lower temperatures to it."""


def vllm_params(params: SamplingParams, stops: Collection[int]) -> Request:
    """Return the fields of `vllm.SamplingParams`; `stops` are the model's end tokens.

    A ValueError names parameters that vLLM does not support, or with which its log-probs would
    differ from ours.
    """
    require_sampling(params, "vLLM")
    if params.top_k or params.top_p < 1:
        raise ValueError(
            f"top_k={params.top_k}, top_p={params.top_p}: vLLM's log-probabilities would be over "
            f"the remaining tokens, the trainer's are over all; use top_k=0 and top_p=1"
        )
    if 0 < params.temperature < COLDEST:
        raise ValueError(f"temperature={params.temperature}: vLLM accepts 0, or at least {COLDEST}")
    own = () if params.ignore_eos else stops
    return {
        "n": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "stop_token_ids": sorted({*(params.stop_token_ids or ()), *own}),
        "ignore_eos": True,  # stop_token_ids names the end tokens
        "logprobs": 0,
        "flat_logprobs": True,
    }
