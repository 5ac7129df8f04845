"""Offload and reload of a trainer's tags, and the host memory that offloaded tags take."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memsaver import ContentWatch, MemorySaver, Prefetch
from memsaver.content_watch import lost_by_others, shortfall
from memsaver.errors import BackendError, HostMemoryError, OutOfMemory, StateError
from memsaver.ops.layout import round_up
from memsaver.system.interrupts import deliver, held
from rollout.engine import PeerSaver, handing_over
from trainer_bridge.config import TrainerConfig
from trainer_bridge.models.files.moments_8bit import moment_specs
from trainer_bridge.models.runtime import ALIGN
from trainer_bridge.models.sharded_model import meta_model
from trainer_bridge.tag_names import CRITIC, CRITIC_OPTIM, OPTIM, PARAMS, REFERENCE

# A prefetch leaves memory that has just become free to the engine for this many seconds: an engine
# that waits for memory polls every 20 ms, and taking memory away from it would gain nothing.
_ENGINE_TURN = 0.1
_POLL = 0.1  # seconds between two checks for room, or for interrupts
_SPARE = 1 << 30  # bytes of a GPU that a prefetch leaves free for the engine's steps

Version = Callable[[], Hashable]
Wait = bool | Literal["memory"]


@dataclass(frozen=True)
class _Overlapped:
    """A pause or resume that runs on the offloader's thread."""

    tags: tuple[str, ...]  # tags of the trainer that it moves
    before: frozenset[str]  # tags that were offloaded when it began
    behind: tuple[Future[Any], ...] = ()  # earlier transfers that must end first
    # Completes when the pause has ended or the resume has memory, with a resume's `Prefetch`.
    done: Future[Any] = field(default_factory=Future)
    # Set as soon as a caller waits for the transfer.
    awaited: threading.Event = field(default_factory=threading.Event)


class Offloader:
    """The state of a trainer's tags, and the transfers that move them; owned by the trainer.

    A tag with a version is offloaded without a copy if its content still has the version that was
    offloaded last. Overlapped transfers run in order on one thread, and their tags count as moved
    as soon as they begin: a call that needs one of these tags waits. An overlapped offload always
    copies, even unchanged content.
    """

    def __init__(self, saver: MemorySaver) -> None:
        # Attributes belong to the trainer's thread, so they need no lock. The offloader's thread
        # gets what it moves as arguments and answers through futures. It only calls `order`, which
        # reads addresses that do not change, and the saver, which has a lock of its own.
        self.order: Callable[[], Sequence[Tensor]] = tuple  # tensors in the order of their reload
        self._prefetching: list[tuple[tuple[str, ...], Prefetch]] = []
        self._saver = saver
        self._watch = ContentWatch(saver)
        self._tags: dict[str, Version | None] = {}
        self._memory_of: dict[str, tuple[str, ...]] = {}
        self._offloaded: set[str] = set()
        self._pinned: set[str] = set()  # tags whose copies have pinned host memory
        self._begun: list[_Overlapped] = []
        self._thread = ThreadPoolExecutor(1, "trainer-offloading", saver.backend.bind_thread)

    def add(
        self,
        tag: str,
        version: Version | None = None,
        companions: tuple[str, ...] = (),
        empty: bool = False,
    ) -> None:
        """Add a tag that has memory now.

        `version` returns the version of the tag's content; None if the content always changes.
        `companions` are tags of the saver that move together with the tag, and always change. An
        `empty` tag has no memory, and is offloaded and reloaded in name only.
        """
        self._tags[tag] = version
        self._memory_of[tag] = companions if empty else (tag, *companions)
        self.note(*self._memory_of[tag])

    def note(self, *memory: str) -> None:
        """Mark the content of these saver tags as defined; tags of other owners are ignored."""
        self._watch.note(*[name for name in self._memory(tuple(self._tags)) if name in memory])

    def offload(
        self, *tags: str, wait: bool = True, into: str | None = None, peer: PeerSaver | None = None
    ) -> None:
        """Move tags, all if none is named, to the host and free their memory.

        `wait=False` returns while the copies are running. Memory is freed when they are complete;
        until then the tags must not be written. The tag `into` of `peer`, the engine of this
        device, takes the memory over as far as it needs it.
        """
        self._end_begun()
        self.await_content()
        chosen = self._chosen(tags)
        before = frozenset(filter(self._is_offloaded, self._tags))
        saver = self._saver
        if wait:
            for tag in chosen:
                if (version := self._tags[tag]) is not None and tag not in before:
                    saver.mark_clean(tag, version())
            if memory := self._memory(chosen):  # without tags the saver would pause all
                with handing_over(saver, peer, into) as release:
                    saver.pause(*memory, content="host", release=release)
        else:
            memory = self._memory([tag for tag in chosen if tag not in before])
            saver.backend.synchronize()  # queued kernels may still write the tags
            fresh, self._pinned = set(memory) - self._pinned, self._pinned | set(memory)
            done = self._thread.submit(_move_out, saver, memory, fresh)
            self._begun.append(_Overlapped(chosen, before, done=done))
        self._offloaded |= set(chosen)

    def reload(self, *tags: str, wait: Wait = True) -> None:
        """Reload tags, all if none is named, bit-identical and at the same addresses.

        Nothing changes if memory is missing. `wait=False` returns immediately. The tags return
        behind earlier transfers, as soon as there is room; if there is still no room when a caller
        waits for them, they stay offloaded. `wait="memory"` returns when the tags have memory; a
        reader of their content calls `await_content`.
        """
        if wait:
            self._end_begun()
        if wait is True:
            self.await_content()
        chosen, saver = self._chosen(tags), self._saver
        if memory := self._memory(chosen):
            if wait is True:  # without tags the saver would resume all
                saver.resume(*memory)
            elif wait:
                paused = tuple(tag for tag in chosen if self._is_offloaded(tag))
                if memory := self._memory(paused):
                    self._prefetching.append(
                        (paused, saver.begin_resume(*memory, order=self.order()))
                    )
            else:
                held = saver.report(others=False).tags
                needed = sum(held[tag].live_bytes for tag in memory)
                needed += _SPARE if saver.device.type == "cuda" else 0
                first = _ENGINE_TURN if self._begun else 0.0
                behind = tuple(transfer.done for transfer in self._begun)
                begun = _Overlapped(chosen, frozenset(self._offloaded), behind)
                self._thread.submit(self._prefetch, saver, begun, memory, needed, first)
                self._begun.append(begun)
        self._offloaded -= set(chosen)

    def await_content(
        self, tensors: Sequence[Tensor] | None = None, streams: Sequence[torch.cuda.Stream] = ()
    ) -> None:
        """Wait for the content of tensors, or of all, whose tags have memory; see `Prefetch.wait`.

        On a GPU, `streams` wait in place of the caller. If a copy fails, its tags count as
        offloaded again.
        """
        for pending in tuple(self._prefetching):
            tags, prefetch = pending
            try:
                prefetch.wait(tensors, streams)
            except BackendError:
                self._prefetching.remove(pending)
                self._offloaded.update(tags)
                raise
            if tensors is None:
                self._prefetching.remove(pending)

    # May not be called with the saver's lock held, for which the transfers wait.
    @held()  # an interrupt inside of `wait` would leave a future locked
    def _end_begun(self) -> None:
        """Wait until begun offloads are complete and begun reloads have memory; raise errors."""
        if self._begun:
            self._saver.backend.require_own_process()  # the thread is not there in a forked child
        for transfer in self._begun:
            transfer.awaited.set()
        while wait([transfer.done for transfer in self._begun], _POLL).not_done:
            deliver()  # raises pending interrupts; the transfers stay begun
        for transfer in tuple(self._begun):
            if (error := transfer.done.exception()) is None:
                if (prefetch := transfer.done.result()) is not None:
                    self._prefetching.append((transfer.tags, prefetch))
                self._begun.remove(transfer)
                continue
            before = transfer.before.intersection(transfer.tags)
            self._offloaded = self._offloaded.difference(transfer.tags) | before
            # Some tags may have been paused before the failure.
            self._offloaded.update(filter(self._is_offloaded, transfer.tags))
            self._begun.remove(transfer)
            short = isinstance(error, OutOfMemory) and not isinstance(error, HostMemoryError)
            # A reload that lacked memory can be tried again.
            if not (short and transfer.before.issuperset(transfer.tags)):
                raise error

    def close(self) -> None:
        """Wait for begun transfers, ignoring their errors, and refuse new ones."""
        self._thread.shutdown()

    def require(
        self, method: str, *tags: str, prefetching: bool = False, undefined: bool = False
    ) -> None:
        """Require that tags have memory and defined content, or raise a StateError.

        The text names `method`, which needs the tags. Names that the trainer does not have are
        ignored. With `prefetching` the call does not wait for the content, because its readers do.
        With `undefined` it accepts content that another user of the saver has discarded.
        """
        if any(set(tags) & set(transfer.tags) for transfer in self._begun):
            self._end_begun()
        if not prefetching and any(set(tags) & set(pending) for pending, _ in self._prefetching):
            self.await_content()
        for tag in [tag for tag in tags if tag in self._tags]:
            if self._is_offloaded(tag):
                raise StateError(
                    f"{method}() needs tag {tag!r}, which is offloaded; call reload({tag!r}) first"
                )
            if lacking := shortfall(self._saver, self._memory_of[tag]):
                raise StateError(f"{method}() needs tag {tag!r}: {lacking}")
            if not undefined and (lost := self._watch.lost(*self._memory_of[tag])):
                raise StateError(
                    f"{method}() needs tag {tag!r}: {lost_by_others(lost, 'trainer')}; "
                    "call load_checkpoint(), or create a new trainer"
                )

    def _is_offloaded(self, tag: str) -> bool:
        """Return whether the tag counts as offloaded, or the saver has paused its memory."""
        return tag in self._offloaded or any(map(self._saver.is_paused, self._memory_of[tag]))

    def _prefetch(
        self, saver: MemorySaver, begun: _Overlapped, tags: Sequence[str], needed: int, pause: float
    ) -> None:
        """Resume tags once `needed` bytes of the device are free, or a caller waits for them.

        The first check comes after `pause` seconds. The result goes to `begun.done`.
        """
        try:
            awaited, due = begun.awaited.wait(pause), all(future.done() for future in begun.behind)
            if due and (awaited or saver.free_bytes >= needed):
                with contextlib.nullcontext() if awaited else contextlib.suppress(OutOfMemory):
                    return begun.done.set_result(saver.begin_resume(*tags, order=self.order()))
            # Resubmit rather than loop: the pool refuses work once Python or the trainer ends.
            self._thread.submit(self._prefetch, saver, begun, tags, needed, _POLL)
        except BaseException as error:
            begun.done.set_exception(error)

    def _memory(self, tags: Sequence[str]) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self._memory_of[tag] for tag in tags))

    def _chosen(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        for tag in tags:
            if tag not in self._tags:
                raise ValueError(
                    f"unknown tag {tag!r}; the trainer has only {', '.join(map(repr, self._tags))}"
                )
        return tags or tuple(self._tags)


def _move_out(saver: MemorySaver, tags: Sequence[str], fresh: Collection[str]) -> None:
    """Copy all tags to the host, and pause each tag when its copy is complete.

    The saver is free for other callers between the calls. The caller guarantees that no kernel
    that uses the tags is queued, and that the tags are not written.
    """
    _pin(saver, fresh)
    copies = [saver.save(tag, ("begun", time.monotonic_ns())) for tag in tags]
    for tag, copy in zip(tags, copies, strict=True):
        if copy is not None:
            copy.synchronize()
        saver.pause(tag, content="host", streams=())


def _pin(saver: MemorySaver, tags: Collection[str]) -> None:
    """Pin the host memory for copies of tags: in `save` this would block the saver for seconds."""
    held = saver.report(others=False).tags
    arena = saver.pinned_arena
    arena.give(arena.take(sum(held[tag].live_bytes for tag in tags)))


def reserve_offload(config: TrainerConfig, ranks: int, saver: MemorySaver) -> None:
    """Begin to obtain the host memory in which one of `ranks` ranks offloads `config.leaving`.

    The memory is obtained in the background. A second call adds nothing.
    """
    if sizes := offloaded_bytes(config, ranks):
        saver.reserve_host(sizes)


def offloaded_bytes(config: TrainerConfig, ranks: int) -> dict[str, int]:
    """Compute the host bytes by tag that copies of `config.leaving` take on one of `ranks` ranks.

    The sizes come from the model's config.json alone. The critic counts as large as the policy.
    """
    if not config.leaving:
        return {}
    params = list(meta_model(config).parameters())
    trained = [param for param in params if param.requires_grad]
    sizes = {
        PARAMS: _held(params, ranks),
        OPTIM: 0 if config.optimizer_offload else _moments(trained, ranks, config),
        CRITIC: _held(params, ranks, config.torch_dtype.itemsize),
        CRITIC_OPTIM: _moments(params, ranks, config),
        REFERENCE: _held(params, ranks, config.torch_param_dtype.itemsize),
    }
    return {tag: sizes[tag] for tag in config.leaving}


def _moments(params: Iterable[nn.Parameter], ranks: int, config: TrainerConfig) -> int:
    """Compute the bytes of the moments of a rank's rows of `params`."""
    if config.optimizer == "adamw":
        return 2 * _held(params, ranks, config.torch_dtype.itemsize)
    total = 0
    for param in params:
        shape, parts = tuple(param.shape), (ranks, *[1] * (param.ndim - 1))
        local = (-(-shape[0] // ranks), *shape[1:])
        for size, dtype in moment_specs(shape, local, parts).values():
            total += round_up(math.prod(size) * dtype.itemsize, ALIGN)
    return total


def _held(params: Iterable[nn.Parameter], ranks: int, itemsize: int | None = None) -> int:
    """Compute the bytes of a rank's rows of `params`; `itemsize` overrides the parameters' own."""
    total = 0
    for param in params:
        rows = -(-param.shape[0] // ranks)
        elements = rows * param[0].numel()
        total += round_up(elements * (itemsize or param.element_size()), ALIGN)
    return total
