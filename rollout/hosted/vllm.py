"""vLLM as a rollout: generates, sleeps by tags, and has its weights replaced in place."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from rollout.hosted.base import Answers, Generating, HostedRollout, OnStep, Prompts, Request
from rollout.hosted.vllm_engine import VllmEngine, several_ranks
from rollout.model.loading import resolve_model, stop_token_ids
from rollout.parallel import TensorParallel
from rollout.requests import Completion, SamplingParams


class VllmRollout(HostedRollout, Generating):
    """A `Rollout` over vLLM's engine in this process. Not thread-safe: one call at a time.

    It is what `Engine` is to trainer and cycle; `docs/how-to/vllm.md` lists what it refuses. Ranks
    that share an engine make the same calls in the same order, and all get the same answers.
    `generate` refuses what vLLM cannot do with our log-probabilities: beam search, top-k and top-p,
    temperatures between 0 and 0.01; and where ranks that share an engine ask different things.
    """

    def __init__(self, engine: VllmEngine, path: str | Path, seed: int = 0) -> None:
        """seed: of requests that bring none, where ranks share the engine. See `HostedRollout`."""
        super().__init__(engine, path)
        self.engine = engine
        self._stops = stop_token_ids(path)
        self._seeds = random.Random(seed)

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
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> Self:
        """vLLM's engine for a model directory, or ORG/NAME of the Hub.

        Sizes as in `EngineConfig`; options: further ones of `vllm.LLM`. load_weights: False draws
        dummy ones, undefined until an update commits.

        In a torch.distributed group of several ranks, all of them call this, each for a GPU of its
        own: every tensor_parallel_size neighbours share an engine, and the engines are replicas.
        ValueError where the ranks ask for different ones.
        """
        device, path = torch.device(device), resolve_model(path)
        chosen = {
            "dtype": str(dtype).removeprefix("torch."),
            "load_format": "auto" if load_weights else "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": not cuda_graphs,
            "tensor_parallel_size": tensor_parallel_size,
            "block_size": page_size,
            # one block is padding; the count decides, whatever the bytes would be
            "num_gpu_blocks_override": kv_tokens // page_size + 1,
            "gpu_memory_utilization": 0.01,
            "max_num_seqs": max_running,
            "max_num_batched_tokens": max(max_prefill_tokens, max_running),
            "max_model_len": max_context_len,
            # temperature is in them, as in our own
            "logprobs_mode": "processed_logprobs",
            **options,
        }
        seed = (seed + _take_seat(device, tensor_parallel_size, f"{path} {seed} {chosen}")) % 2**63
        room = torch.cuda.mem_get_info(device)[1]
        engine = VllmEngine.start(path, {"seed": seed, "kv_cache_memory_bytes": room, **chosen})
        rollout = cls(engine, path, seed)
        if load_weights:
            rollout.store.define(0)
        return rollout

    # ---------------------------------------------------------------- generate

    def requests(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        return [vllm_params(params, self._stops)]

    def completions(self, output: Any, version: int) -> list[Completion]:
        return [
            Completion(
                token_ids=list(sample.token_ids),
                logprobs=list(sample.logprobs.logprobs),
                finish_reason=sample.finish_reason,
                weight_versions=[version] * len(sample.token_ids),
            )
            for sample in sorted(output.outputs, key=lambda each: each.index)
        ]

    def run(self, prompts: Prompts, requests: Sequence[Request], on_step: OnStep) -> None:
        def checked(answers: Answers) -> None:
            on_step(answers)
            self._require_undisturbed()

        with self._in_step((list(map(list, prompts)), requests)):
            self.engine.run(prompts, requests, checked)

    @contextmanager
    def _in_step(self, asked: object) -> Iterator[None]:
        """Each rank schedules and samples by itself, and the others wait for it in every layer:
        what is asked is the same, what is drawn too, and a rank that fails takes no further part.
        """
        if self._ranks.size == 1:
            yield
            return
        seed = self._seeds.getrandbits(63)
        words = sha256(repr((asked, seed)).encode()).hexdigest()
        self._ranks.check_same("what is asked", words)
        try:
            with drawn_from(seed, self.saver.device):
                yield
        except BaseException as error:
            self._ranks.fail(error)
            raise

    def close(self) -> None:
        """End vLLM's engine, and give all memory back."""
        self.engine.close()


def _take_seat(device: torch.device, size: int, options: str) -> int:
    """Makes the rank's GPU the current one; returns the number of its engine among the replicas.
    size: ranks of an engine. options: the same on all ranks.
    """
    if not several_ranks():
        if device.type != "cuda" or device.index:
            raise ValueError(
                f"device={device}: vLLM in this process takes its first GPU; set "
                f"CUDA_VISIBLE_DEVICES, and device=cuda"
            )
        if size > 1:
            raise ValueError(
                f"tensor_parallel_size={size} takes processes of one torch.distributed group, each "
                f"with its part; start them by torchrun, or by open_ray"
            )
        return 0
    ranks = dist.get_world_size()
    if device.type != "cuda" or ranks % size:
        raise ValueError(
            f"device={device}, tensor_parallel_size={size}: each of the {ranks} ranks takes a GPU, "
            f"and engines are of equal size; use cuda:N, and a size that divides {ranks}"
        )
    if device.index is not None:
        torch.cuda.set_device(device)
    TensorParallel(ranks, dist.group.WORLD).check_same("the model or an option of vLLM", options)
    return dist.get_rank() // size


@contextmanager
def drawn_from(seed: int, device: torch.device) -> Iterator[None]:
    """Has torch's and NumPy's own generators begin at `seed` inside; afterwards they go on as if
    nothing had been drawn.

    vLLM 0.24 samples requests without a seed from these (one of its runners from torch's, the other
    with seeds of NumPy's), and a trainer of this process may have drawn from them, as no other rank
    did.
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
"""vLLM raises temperatures between 0 and this one to it."""


def vllm_params(params: SamplingParams, stops: Collection[int]) -> Request:
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
    own = () if params.ignore_eos else stops
    return {
        "n": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "stop_token_ids": sorted({*(params.stop_token_ids or ()), *own}),
        "ignore_eos": True,  # they are all named
        "logprobs": 0,
        "flat_logprobs": True,
    }
