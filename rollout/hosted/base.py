"""Sleep and weight updates of hosted engines, which belong to another project."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memsaver import Content, ContentWatch, MemorySaver, Release, StateError
from memsaver.content_watch import lost_by_others, shortfall
from memsaver.system.interrupts import held
from memsaver.system.plain import all_gather_plain
from rollout.engine.engine_base import EngineBase, InFlight, Unfinished
from rollout.engine.step_decisions import StepDecisions
from rollout.hosted.load_recorder import (
    check_filled,
    check_taken,
    manifest_of,
    parts,
    record,
    whole,
)
from rollout.model.loading import buffer_shapes, parameter_shapes, read_buffers
from rollout.parallel import TensorParallel
from rollout.requests import SamplingParams
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS
from rollout.weights.messages import UpdateReceipt, WeightOffer
from rollout.weights.pages import WeightPages
from rollout.weights.update import WeightUpdate

Request = dict[str, Any]
"""Sampling parameters in the engine's own format."""
DEFAULT_TOKENS = 65536
"""Tokens of a KV pool whose size is not given."""


class HostedEngine(ABC):
    """Another project's engine, in the process that has its weights.

    Attributes:
        name: Name of the engine in error messages.
        experts_option: The engine's option that chooses the kernel of experts.
        graphs_need_content: Whether captured graphs read data that only the capture has written to
            their memory.
        group: Gloo group of the processes that share the model; None if this process has all of it.
        saver: The saver on whose tags the engine's memory lies.
        model: The model, with its own `load_weights`.
    """

    name: ClassVar[str]
    experts_option: ClassVar[str]
    graphs_need_content: ClassVar[bool]
    group: dist.ProcessGroup | None = None
    saver: MemorySaver
    model: Any

    @abstractmethod
    def tags_behind(self, tag: str) -> list[str]:
        """Return the saver's tags that make up an engine tag."""

    @abstractmethod
    def is_plain(self, module: nn.Module) -> bool:
        """Return whether a layer uses its weights where `load_weights` puts them, not copies."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget all keys and values, or raise a StateError while a request uses some."""

    def refill_kv_state(self) -> None:
        """Rewrite the data next to the KV cache that a sleep has discarded."""
        return

    def check_plain(self) -> None:
        """Raise a ValueError naming a layer whose weights cannot be written in place."""
        for name, module in self.model.named_modules():
            if not self.is_plain(module):
                method = type(getattr(module, "quant_method", None) or module).__name__
                raise ValueError(
                    f"{name}: {self.name}'s {method} repacks weights after loading, or computes "
                    f"with copies, which an update would not change; use unquantized weights, "
                    f"{self.experts_option}='triton' for experts, or engine.kind=native"
                )


class HostedRollout(EngineBase):
    """A `Rollout` over a hosted engine, without `generate`.

    It is not thread-safe: one call at a time. Ranks that share a model build it, sleep and wake up
    together.
    """

    def __init__(self, engine: HostedEngine, path: str | Path) -> None:
        """Record where the engine's weights lie.

        A ValueError names the first parameter that is not a plain copy of the checkpoint at `path`.
        """
        self._hosted = engine
        group = engine.group
        self._ranks = TensorParallel(1 if group is None else dist.get_world_size(group), group)
        self.decisions = StepDecisions(self._ranks)
        self.saver: MemorySaver = engine.saver
        self.store = self._laid_out(path)
        self._buffers = _host_copies(engine.model, self.saver.device, self.store.buffers.values())
        if not self._sleeps(WEIGHTS):
            self._save_buffers()
        self._watch = ContentWatch(self.saver, *self._behind(*TAGS))
        self._update = WeightUpdate(self.store, self.saver, engine.reset_prefix_cache)

    def _laid_out(self, path: str | Path) -> WeightPages:
        model, saver = self._hosted.model, self.saver
        self._hosted.check_plain()
        first = next(model.parameters())
        tags = {saver.tag_of(first)} & {*self._hosted.tags_behind(WEIGHTS)}
        for name, param in model.named_parameters():
            if (tag := saver.tag_of(param)) not in tags:
                raise ValueError(f"{name} lies on tag {tag}, not with the weights")
        shapes, aliases = parameter_shapes(path)
        buffers = buffer_shapes(path)
        address = first.data_ptr() - saver.offset_of(first)
        recording = record(model.load_weights, model, shapes | buffers)
        manifest = manifest_of(recording, shapes, aliases, lambda pointer: pointer - address)
        mine, group = parts(manifest), self._hosted.group
        check_taken([mine] if group is None else all_gather_plain(mine, group), shapes)
        check_filled(recording, model)
        arena = saver.backend.window(address, manifest.nbytes, saver)
        store = WeightPages(manifest, shapes, arena, saver)
        store.buffers = whole(recording, model, buffers)
        if not saver.is_paused(store.tag):
            store.set_buffers(read_buffers(path, store.buffers), str(path))
        return store

    @property
    def unfinished(self) -> list[int]:
        """Return the numbers of the requests of `submit`, which SGLang does not have."""
        return []

    def _abort(self, ids: Sequence[int]) -> None:
        """End requests with their present answers."""

    def _require_finished(self, action: str) -> None:
        if left := self.unfinished:
            raise StateError(
                f"cannot {action} with unfinished requests {left}: {self._hosted.name} cannot "
                f"start them over; step until they end, or abort them"
            )

    # ---------------------------------------------------------------- sleep and wake up

    def _before_sleep(self, unfinished: Unfinished) -> None:
        if unfinished == "abort":
            left = self.unfinished
            self._abort(left)
            self.decisions.abort(left)
        self._require_finished("sleep")

    def _before_discard(self) -> None:
        if not self._sleeps(WEIGHTS) and not self._lost(WEIGHTS):
            self._save_buffers()

    def _sleep_caches(self, tags: Sequence[str], unfinished: Unfinished, release: Release) -> None:
        if KV_CACHE in tags:
            self._hosted.reset_prefix_cache()
        for tag in tags:  # graphs need their memory's content, so every level keeps it
            content: Content = "host" if tag == CUDA_GRAPH else "discard"
            for name in self._hosted.tags_behind(tag):
                self.saver.pause(name, content=content, release=release)

    @held()
    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        """Map memory behind tags at their addresses, all of them or none.

        Args:
            tags: Tags to resume; None: all.
            partly: Without effect, because the engine's KV cache has a fixed size.

        Raises:
            OutOfMemory: The device has too little memory. Nothing changed.
            ValueError: A tag is unknown.
        """
        behind = self._behind(*self._known(tags))
        if asleep := [name for name in behind if self.saver.is_paused(name)]:
            self.saver.resume(*asleep)
        # Even if no tag was asleep: an earlier wake-up may have failed before it refilled them.
        self._refill_buffers()
        if self._lost(KV_CACHE) and not self._sleeps(KV_CACHE):
            self._start_over()

    def _save_buffers(self) -> None:
        for buffer, saved in self._buffers:
            saved.copy_(buffer, non_blocking=True)  # a pause waits for the device

    def _refill_buffers(self) -> None:
        if (lost := self._lost(WEIGHTS)) and not self._sleeps(WEIGHTS):
            for buffer, saved in self._buffers:
                buffer.copy_(saved, non_blocking=True)
            self._watch.note(*lost)

    def _start_over(self) -> None:
        self._hosted.reset_prefix_cache()
        self._hosted.refill_kv_state()
        self._watch.note(*self._behind(KV_CACHE))

    def make_ready(self) -> str | None:
        """Return why `generate` must refuse; None if it can run.

        If other users of a rank's saver discarded keys and values, all ranks forget theirs.
        """
        reason = self.unavailable_reason()
        if self._ranks.failure is not None:
            return reason
        kept = not self._lost(KV_CACHE)
        rank_reason, kept = self._ranks.agree_ready(reason, kept, torch.device("cpu"))
        if rank_reason is None and not kept:
            self._start_over()
        return reason or rank_reason

    def _require_undisturbed(self) -> None:
        """Raise a StateError if other users of the saver took memory or content during requests."""
        reason = self.unavailable_reason()
        if reason is None and (lost := self._lost(KV_CACHE)):
            reason = lost_by_others(lost, "engine")
        if reason is not None:
            raise StateError(f"cannot continue: {reason}; no request is left")

    def unavailable_reason(self) -> str | None:
        """Return why `generate` would raise a StateError now; None if the engine is available."""
        reasons = []
        if paused := [tag for tag in TAGS if self._sleeps(tag)]:
            reasons.append(f"paused: {', '.join(paused)} (call wake_up)")
        elif lacking := shortfall(self.saver, self._behind(*TAGS)):
            reasons.append(lacking)
        elif lost := self._lost(WEIGHTS):
            reasons.append(f"{lost_by_others(lost, 'engine')} (call wake_up)")
        if self._hosted.graphs_need_content and (lost := self._lost(CUDA_GRAPH)):
            reasons.append(f"{lost_by_others(lost, 'engine')}: graphs need it; build a new engine")
        if self._ranks.failure is not None:
            reasons.append(self._ranks.failure)
        if self.store.version is None:
            reasons.append(f"weights undefined: {self.store.undefined_reason}")
        return "; ".join(reasons) or None

    def _sleeps(self, tag: str) -> bool:
        return any(map(self.saver.is_paused, self._behind(tag)))

    def _lost(self, tag: str) -> list[str]:
        return self._watch.lost(*self._behind(tag))

    def _behind(self, *tags: str) -> list[str]:
        return [*chain.from_iterable(map(self._hosted.tags_behind, tags))]

    # ---------------------------------------------------------------- weight update

    @held()
    def begin_update(
        self,
        version: int,
        *,
        shadow: bool = False,
        names: Sequence[str] | None = None,
        in_flight: InFlight = "refuse",
    ) -> WeightOffer:
        """Offer the weights' pages for a new version, as `Engine.begin_update` does.

        Args:
            version: Number of the new version.
            shadow: Must be False: the engine's buffers lie on the tag among its parameters.
            names: Only these parameters will be written; None: all.
            in_flight: Must be "refuse": the engine's cache knows no versions.

        Returns:
            The offer, with a ticket to the pages.

        Raises:
            ValueError: `in_flight` is another, shadow pages are wanted, the version is older than
                the present one, a name is unknown, or `names` is empty.
            StateError: The weights sleep, requests are unfinished, or `names` are given while the
                weights are undefined.
        """
        if shadow:
            raise ValueError(
                f"{self._hosted.name}'s weights have no shadow pages: its buffers lie among them; "
                "sync without shadow, when generate has returned"
            )
        if in_flight != "refuse":
            raise ValueError(
                f"in_flight={in_flight!r}: {self._hosted.name}'s cache knows no versions; sync "
                "when no request runs, or use engine.kind=native"
            )
        self._require_finished("begin a weight update")
        # Before the update is written: some buffers may be views of parameters.
        self._refill_buffers()
        return self._update.begin(version, False, names)

    def alias_update(self, version: int, *_: Any, **__: Any) -> UpdateReceipt:
        """Raise a StateError, because the engine's own buffers lie among its weights."""
        raise StateError(
            f"{self._hosted.name} cannot serve the trainer's own pages: its buffers lie among its "
            "weights; sync by copies (alias=False)"
        )


_NATIVE = (
    "beam_width", "forced", "min_p", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "top_logprobs",
    "json_schema", "prompt_logprobs",
)  # fmt: skip


def require_sampling(params: SamplingParams, library: str) -> None:
    """Raise a ValueError if the answers are not to be sampled by the library."""
    for name in _NATIVE:
        if (value := getattr(params, name)) != getattr(SamplingParams, name):
            rule = f"{library} only samples its answers; leave it out, or use the native engine"
            raise ValueError(f"{name}={value}: {rule}")
    if params.priority:
        rule = f"{library} answers in order here; leave it out, or use the native engine"
        raise ValueError(f"priority={params.priority}: {rule}")
    if params.adapter is not None:
        rule = f"{library} serves merged adapters here; leave it out, or use the native engine"
        raise ValueError(f"adapter={params.adapter!r}: {rule}")


def _host_copies(
    model: nn.Module, device: torch.device, updatable: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return the model's buffers and the updatable buffers, each with host memory for its content.

    Weight updates do not write these tensors, so a discard of their tag must not lose them. Of
    tensors that start at the same address, only the longest is included.
    """
    pinned = device.type == "cuda"
    spans = [_span(buffer) for buffer in model.buffers() if buffer.device == device]
    spans += [_span(buffer) for buffer in updatable]
    longest = {span.data_ptr(): span for span in sorted(spans, key=lambda span: span.nbytes)}
    return [
        (span, torch.empty_like(span, device="cpu", pin_memory=pinned)) for span in longest.values()
    ]


def _span(tensor: Tensor) -> Tensor:
    """Return all elements from a tensor's first to its last, once, in the order of memory."""
    if not tensor.numel():
        return tensor.flatten()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach().as_strided((1 + sum((n - 1) * step for n, step in pairs),), (1,))
