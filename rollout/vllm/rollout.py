"""vLLM as a rollout: generates, sleeps by tags, and has its weights replaced in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from memsaver import MemorySaver, StateError, Ticket
from memsaver.common.signals import held
from memsaver.vmm import empty_torch_cache
from rollout.engine_base import EngineBase
from rollout.model import parameter_shapes, stop_token_ids
from rollout.partner import handing_over
from rollout.protocols import Progress
from rollout.serving import for_each
from rollout.tags import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS
from rollout.types import (
    CommitReceipt,
    Completion,
    SamplingParams,
    WeightOffer,
)
from rollout.vllm.engine import VllmEngine
from rollout.vllm.layout import manifest_of
from rollout.vllm.recording import record
from rollout.vllm.requests import completions, vllm_params
from rollout.weights.arena import WeightArena
from rollout.weights.update import WeightUpdate, require_active

# vLLM's tags behind each of ours; "workspace" and what follows are those of 0.33
_BEHIND = {
    WEIGHTS: ("weights",),
    KV_CACHE: ("kv_cache", "workspace"),
    CUDA_GRAPH: ("cudagraph", "runtime"),
}
_KEPT = _BEHIND[CUDA_GRAPH]  # with content, at every level: graphs replay over it


class VllmRollout(EngineBase):
    """A `Rollout` over vLLM's engine in this process. Not thread-safe: one call at a time.

    It is what `Engine` is to trainer and cycle; `docs/how-to/vllm.md` lists what it refuses.
    """

    def __init__(self, engine: VllmEngine, path: str | Path) -> None:
        """path: the model's directory. ValueError where the model's weights are not plain copies of
        a checkpoint's; names the first parameter that is not.
        """
        self.engine = engine
        self._stops = stop_token_ids(path)
        self.saver: MemorySaver = engine.saver
        self._buffers = _beside_parameters(engine.model, self.saver.device)
        self._buffers_lost = False
        self.store = self._laid_out(path)
        self._update = WeightUpdate(self.store, self.saver, engine.reset_prefix_cache)

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
        engine = VllmEngine(
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

    def _laid_out(self, path: str | Path) -> WeightArena:
        model, saver = self.engine.model, self.saver
        self.engine.check_plain()
        for name, param in model.named_parameters():
            if (tag := saver.tag_of(param)) != WEIGHTS:
                raise ValueError(f"{name} lies on tag {tag}, not with the weights")
        shapes, aliases = parameter_shapes(path)
        first = next(model.parameters())
        address = first.data_ptr() - saver.offset_of(first)
        recording = record(self.engine.load_weights, model, shapes)
        manifest = manifest_of(recording, shapes, aliases, model, lambda at: at - address)
        arena = saver.backend.window(address, manifest.nbytes, saver)
        return WeightArena(manifest, shapes, arena, 0, WEIGHTS)

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

    # ---------------------------------------------------------------- sleep and wake up

    @held()
    def sleep(
        self,
        level: int = 1,
        unfinished: str = "raise",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None:
        """Give the memory of the tags (None: all) back; see `Engine.sleep`. No request is ever
        unfinished here.

        What vLLM has outside of its tags stays: see `report()` and docs/how-to/vllm.md.
        """
        if level not in (1, 2):
            raise ValueError(
                f"sleep level={level} must be 1 (keep weights on the host) or 2 (discard them)"
            )
        chosen = self._known(tags)
        with handing_over(self.saver, self._partner, into) as release:
            if WEIGHTS in chosen:
                self._update.before_sleep()
                keep = level == 1 and self._update.keepable
                if not keep and not self.saver.is_paused(WEIGHTS):
                    for buffer, saved in self._buffers:
                        saved.copy_(buffer, non_blocking=True)  # a pause waits for the device
                    self._buffers_lost = True
                content = "host" if keep else "discard"
                self.saver.pause(WEIGHTS, content=content, release=release)
                self._update.on_sleep(level)
            if KV_CACHE in chosen:
                self.engine.reset_prefix_cache()
            for tag in self._behind([tag for tag in chosen if tag != WEIGHTS]):
                content = "host" if tag in _KEPT else "discard"
                self.saver.pause(tag, content=content, release=release)
        if KV_CACHE in chosen:
            empty_torch_cache(self.saver.device)

    @held()
    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        """Put memory of the tags (None: all) back at the same addresses: all of them or none.

        partly: without effect, vLLM's KV cache does not grow.
        """
        asleep = [tag for tag in self._behind(self._known(tags)) if self.saver.is_paused(tag)]
        if asleep:
            self.saver.resume(*asleep)
        if WEIGHTS in asleep and self._buffers_lost:
            for buffer, saved in self._buffers:
                buffer.copy_(saved, non_blocking=True)
            self._buffers_lost = False

    def unavailable_reason(self) -> str | None:
        """Returns why `generate` would refuse now; None when it would not."""
        reasons = []
        if paused := [tag for tag in self._behind(TAGS) if self.saver.is_paused(tag)]:
            reasons.append(f"paused: {', '.join(paused)} (call wake_up)")
        if self.store.version is None:
            reasons.append(f"weights undefined: {self.store.undefined_reason}")
        return "; ".join(reasons) or None

    def _behind(self, tags: Sequence[str]) -> list[str]:
        """The saver's tags that these are."""
        names = chain.from_iterable(_BEHIND[tag] for tag in tags)
        return [name for name in names if name in self.saver.tags]

    # ---------------------------------------------------------------- weight update

    @held()
    def begin_update(
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer:
        """See `Engine.begin_update`. A ValueError refuses shadow pages: on the tag lies more of
        vLLM's than its parameters.
        """
        if shadow:
            raise ValueError(
                "vLLM's weights have no second pages: its buffers lie among them; sync without "
                "shadow, when generate has returned"
            )
        return self._update.begin(version, False, names)

    @held()
    def commit_update(self, version: int) -> CommitReceipt:
        """See `Engine.commit_update`; vLLM's prefix cache is empty since the update began."""
        return self._update.commit(version)

    def adopt_update(
        self, version: int, ticket: Ticket, layout_hash: str, digest: int | None = None
    ) -> CommitReceipt:
        """Raises a StateError: vLLM's own buffers lie among its weights."""
        raise StateError(
            "vLLM cannot serve the trainer's own pages: its buffers lie among its weights; "
            "sync by copies (alias=False)"
        )

    @held()
    def abort_update(self, reason: str) -> None:
        """See `Engine.abort_update`."""
        self._update.abort(reason)

    def digest(self) -> int:
        """Returns the digest of the parameters as they lie in vLLM's memory now; StateError while
        they sleep.
        """
        require_active(self.saver, WEIGHTS, "read the weights")
        return self.store.digest()

    # ---------------------------------------------------------------- memory

    def close(self) -> None:
        """End vLLM's engine, and give all memory back."""
        self.engine.close()


def _beside_parameters(model: nn.Module, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The model's buffers, which no update brings, each with host memory for it."""
    pinned = device.type == "cuda"
    there = {each.data_ptr(): each for each in model.buffers() if each.device == device}
    return [
        (each, torch.empty_like(each, device="cpu", pin_memory=pinned)) for each in there.values()
    ]
