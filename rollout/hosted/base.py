"""Sleeps and weight updates of an engine that is another project's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memsaver import Content, ContentWatch, MemorySaver, Release, StateError
from memsaver.content_watch import lost_by_others, shortfall
from memsaver.memory import empty_torch_cache
from memsaver.system.interrupts import held
from memsaver.system.plain import all_gather_plain
from rollout.engine_base import EngineBase, check_sleep_level, handing_over
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
from rollout.protocols import Progress
from rollout.requests import Completion, SamplingParams
from rollout.serving import for_each
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS
from rollout.weights.messages import UpdateReceipt, WeightOffer
from rollout.weights.pages import WeightPages
from rollout.weights.update import WeightUpdate, require_active

Request = dict[str, Any]
"""Sampling parameters in an engine's own words."""
Answers = Iterable[tuple[int, Any]]
"""Numbers of requests, and the engine's outputs for them."""
OnStep = Callable[[Answers], None]
Prompts = Sequence[Sequence[int]]


class HostedEngine(ABC):
    """Another project's engine, in the process that has its weights.

    Attributes:
        name: What errors call the engine.
        experts_option: The engine's option that chooses how experts are computed.
        graphs_need_content: Captured graphs read what only the capture has written into their
            memory.
        group: Processes that share the model, on gloo; None where this one has all of it.
        saver: The saver on whose tags the engine's memory is.
        model: The model, with a `load_weights` of its own.
    """

    name: ClassVar[str]
    experts_option: ClassVar[str]
    graphs_need_content: ClassVar[bool]
    group: dist.ProcessGroup | None = None
    saver: MemorySaver
    model: Any

    @abstractmethod
    def tags_behind(self, tag: str) -> list[str]:
        """Return the saver's tags that make up one of ours."""

    @abstractmethod
    def is_plain(self, module: nn.Module) -> bool:
        """Return whether a layer computes with its weights where the model's `load_weights` puts
        them, and not with copies.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget all keys and values; StateError while a request holds some."""

    def refill_kv_state(self) -> None:
        """Write again what lies beside the KV cache, whose content a sleep lost."""
        return

    def check_plain(self) -> None:
        """Raise a ValueError naming a layer whose weights cannot be written in place."""
        for name, module in self.model.named_modules():
            if not self.is_plain(module):
                method = type(getattr(module, "quant_method", None) or module).__name__
                raise ValueError(
                    f"{name}: {self.name}'s {method} repacks weights after loading, or computes "
                    f"with copies, which would stay old; use unquantised ones, "
                    f"{self.experts_option}='triton' for experts, or engine.kind=native"
                )


class Generating(ABC):
    """`generate` of a `HostedRollout`, or of what stands for one of another process, whose engine
    answers requests in its own words.
    """

    engine: Any

    @abstractmethod
    def requests(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        """Return the requests for the samples of a prompt; a ValueError for what is impossible."""

    def run(self, prompts: Prompts, requests: Sequence[Request], on_step: OnStep) -> None:
        """Answer a prompt for each request; pass answers on after every step."""
        self.engine.run(prompts, requests, on_step)

    @abstractmethod
    def completions(self, output: Any, version: int) -> list[Completion]:
        """Return the samples of a request's output."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt params.n times; result [prompt][sample]. See `Engine.generate`.

        Raises:
            StateError: Memory or content is missing, see `unavailable_reason`.
            ValueError: The engine has no words for what is asked.
        """
        rollout: Any = self
        if reason := rollout.make_ready():
            raise StateError(f"cannot generate: {reason}")
        each = for_each(prompts, params)
        asked: list[tuple[int, Request]] = []
        for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            asked += ((number, request) for request in self.requests(prompt, one))
        version, total = rollout.weights_version, sum(one.n for one in each)
        found: list[list[Completion]] = [[] for _ in asked]

        def collect(answers: Answers) -> None:
            for number, output in answers:
                found[number] = self.completions(output, version)
            if on_progress is not None:
                done = list(chain.from_iterable(found))
                on_progress(len(done), total, sum(len(sample.token_ids) for sample in done))

        self.run([prompts[number] for number, _ in asked], [each for _, each in asked], collect)
        by_prompt: list[list[Completion]] = [[] for _ in prompts]
        for (number, _), samples in zip(asked, found, strict=True):
            by_prompt[number] += samples
        return by_prompt


class HostedRollout(EngineBase):
    """All of a `Rollout` but `generate`. Not thread-safe: one call at a time."""

    def __init__(self, engine: HostedEngine, path: str | Path) -> None:
        """path: the model's directory. ValueError where the model's weights are not plain copies of
        a checkpoint's; names the first parameter that is not.

        Ranks that share a model make theirs, sleep, wake up and generate at the same time.
        """
        self._hosted = engine
        group = engine.group
        self._ranks = TensorParallel(1 if group is None else dist.get_world_size(group), group)
        self.saver: MemorySaver = engine.saver
        self.store = self._laid_out(path)
        beside = self.store.buffers.values()
        self._buffers = _beside_parameters(engine.model, self.saver.device, beside)
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
        beside = buffer_shapes(path)
        address = first.data_ptr() - saver.offset_of(first)
        recording = record(model.load_weights, model, shapes | beside)
        manifest = manifest_of(recording, shapes, aliases, lambda at: at - address)
        mine, group = parts(manifest), self._hosted.group
        check_taken([mine] if group is None else all_gather_plain(mine, group), shapes)
        check_filled(recording, model)
        arena = saver.backend.window(address, manifest.nbytes, saver)
        store = WeightPages(manifest, shapes, arena, saver)
        store.buffers = whole(recording, model, beside)
        if not saver.is_paused(store.tag):
            store.set_buffers(read_buffers(path, store.buffers), str(path))
        return store

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

        What the engine has outside of its tags stays: see `report()` and the how-tos.
        """
        check_sleep_level(level)
        chosen = self._known(tags)
        with handing_over(self.saver, self._peer, into) as release:
            if WEIGHTS in chosen:
                self._sleep_weights(level, release)
            if KV_CACHE in chosen:
                self._hosted.reset_prefix_cache()
            for tag in chosen:
                if tag != WEIGHTS:  # graphs replay over what they have: it is kept at every level
                    content: Content = "host" if tag == CUDA_GRAPH else "discard"
                    for name in self._hosted.tags_behind(tag):
                        self.saver.pause(name, content=content, release=release)
        if KV_CACHE in chosen:
            empty_torch_cache(self.saver.device)

    def _sleep_weights(self, level: int, release: Release) -> None:
        self._update.before_sleep()
        keep = level == 1 and self._update.keepable
        if not keep and not self._sleeps(WEIGHTS) and not self._lost(WEIGHTS):
            self._save_buffers()
        content: Content = "host" if keep else "discard"
        self.saver.pause(self.store.tag, content=content, release=release)
        self._update.on_sleep(level)

    @held()
    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        """Put memory of the tags (None: all) back at the same addresses: all of them or none.

        partly: without effect, the engine's KV cache does not grow.
        """
        behind = self._behind(*self._known(tags))
        if asleep := [name for name in behind if self.saver.is_paused(name)]:
            self.saver.resume(*asleep)
        # what failed halfway the last time is made up for
        self._refill_buffers()
        self._refill_kv_cache()

    def _save_buffers(self) -> None:
        for buffer, saved in self._buffers:
            saved.copy_(buffer, non_blocking=True)  # a pause waits for the device

    def _refill_buffers(self) -> None:
        if (lost := self._lost(WEIGHTS)) and not self._sleeps(WEIGHTS):
            for buffer, saved in self._buffers:
                buffer.copy_(saved, non_blocking=True)
            self._watch.note(*lost)

    def _refill_kv_cache(self) -> None:
        if self._lost(KV_CACHE) and not self._sleeps(KV_CACHE):
            self._start_over()

    def _start_over(self) -> None:
        self._hosted.reset_prefix_cache()
        self._hosted.refill_kv_state()
        self._watch.note(*self._behind(KV_CACHE))

    def make_ready(self) -> str | None:
        """Forget keys and values that others discarded, on all ranks where one has lost them.

        Returns:
            Why `generate` refuses; None when it does not.
        """
        reason = self.unavailable_reason()
        if self._ranks.failure is not None:
            return reason
        self._ranks.check_others()  # their groups wait for half an hour
        kept = not self._lost(KV_CACHE)
        others, kept = self._ranks.agree_ready(reason, kept, torch.device("cpu"))
        if others is None and not kept:
            self._start_over()
        return reason or others

    def _require_undisturbed(self) -> None:
        """Raise a StateError where others took memory or content while requests run."""
        reason = self.unavailable_reason()
        if reason is None and (lost := self._lost(KV_CACHE)):
            reason = lost_by_others(lost, "engine")
        if reason is not None:
            raise StateError(f"cannot go on: {reason}; no request is left")

    def unavailable_reason(self) -> str | None:
        """Returns why `generate` would refuse now; None when it would not."""
        reasons = []
        if paused := [tag for tag in TAGS if self._sleeps(tag)]:
            reasons.append(f"paused: {', '.join(paused)} (call wake_up)")
        elif lacking := shortfall(self.saver, self._behind(*TAGS)):
            reasons.append(lacking)
        elif lost := self._lost(WEIGHTS):
            reasons.append(f"{lost_by_others(lost, 'engine')} (call wake_up)")
        if self._hosted.graphs_need_content and (lost := self._lost(CUDA_GRAPH)):
            reasons.append(f"{lost_by_others(lost, 'engine')}: graphs need it; make another engine")
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
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer:
        """See `Engine.begin_update`. A ValueError refuses shadow pages: on the tag lies more of
        the engine's than its parameters.
        """
        if shadow:
            raise ValueError(
                f"{self._hosted.name}'s weights have no second pages: its buffers lie among them; "
                "sync without shadow, when generate has returned"
            )
        self._refill_buffers()  # some may be views of parameters
        return self._update.begin(version, False, names)

    def alias_update(self, version: int, *_: Any, **__: Any) -> UpdateReceipt:
        """Raise a StateError: the engine's own buffers lie among its weights."""
        raise StateError(
            f"{self._hosted.name} cannot serve the trainer's own pages: its buffers lie among its "
            "weights; sync by copies (alias=False)"
        )

    def digest(self) -> int:
        """Returns the digest of the parameters as they lie in the engine's memory now; StateError
        while they sleep.
        """
        require_active(self.saver, self.store.tag, "read the weights")
        return self.store.digest()


def _beside_parameters(
    model: nn.Module, device: torch.device, others: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The model's buffers and `others`, which no page of an update brings, each with host memory
    for it. Of those that begin at one address the longest.
    """
    pinned = device.type == "cuda"
    spans = [_span(each) for each in model.buffers() if each.device == device]
    spans += [_span(each) for each in others]
    there = {each.data_ptr(): each for each in sorted(spans, key=lambda each: each.nbytes)}
    return [
        (each, torch.empty_like(each, device="cpu", pin_memory=pinned)) for each in there.values()
    ]


def _span(tensor: Tensor) -> Tensor:
    """Return all elements from a tensor's first to its last, once, in the order of memory."""
    if not tensor.numel():
        return tensor.flatten()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach().as_strided((1 + sum((n - 1) * step for n, step in pairs),), (1,))
