"""Tracks which of a trainer's tags have memory, and how much host memory they take when
offloaded.
"""

import contextlib
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
from rollout.engine_base import PeerSaver, handing_over
from trainer_bridge.config import TrainerConfig
from trainer_bridge.tags import CRITIC, CRITIC_OPTIM, OPTIM, PARAMS, REFERENCE
from trainer_bridge.training.device import ALIGN
from trainer_bridge.training.model import meta_model

# Seconds that memory which has just been given back is left to others: an engine that waits for
# more looks every 20 ms, and what comes back early is only a gain where it does not. Then, seconds
# between two looks whether there is room.
_OTHERS_TURN, _LOOK = 0.1, 0.1
_SPARE = 1 << 30  # bytes of a GPU that what comes back early leaves to the steps of others

Version = Callable[[], Hashable]
Wait = bool | Literal["memory"]


@dataclass(frozen=True)
class _Overlapped:
    """A pause or resume beside other work. before: what was offloaded then. behind: what comes
    first. done: when its memory is there, with what brings the content. awaited: somebody waits for
    it.
    """

    tags: tuple[str, ...]
    before: frozenset[str]
    behind: tuple[Future[Any], ...] = ()
    done: Future[Any] = field(default_factory=Future)
    awaited: threading.Event = field(default_factory=threading.Event)


class Offloader:
    """Pauses and resumes tags.

    A tag with a version is offloaded without a copy where its content is still of the version that
    was offloaded last. What was begun beside other work counts as done, one after the other, and
    whoever needs one of its tags waits for it. A begun offload copies always, also what has not
    changed.
    """

    def __init__(self, saver: MemorySaver) -> None:
        self.order: Callable[[], Sequence[Tensor]] = tuple  # in which content is to come back
        self._prefetching: list[tuple[tuple[str, ...], Prefetch]] = []
        self._saver = saver
        self._watch = ContentWatch(saver)
        self._tags: dict[str, Version | None] = {}
        self._memory_of: dict[str, tuple[str, ...]] = {}
        self._offloaded: set[str] = set()
        self._pinned: set[str] = set()  # tags that there is host memory for
        self._begun: list[_Overlapped] = []
        self._thread = ThreadPoolExecutor(1, "trainer-offloading", saver.backend.bind_thread)

    def add(
        self,
        tag: str,
        version: Version | None = None,
        beside: tuple[str, ...] = (),
        empty: bool = False,
    ) -> None:
        """Add a tag that has memory now. version: says what its content is called; None: it always
        changes. beside: tags that always change and go with it. empty: the tag has no memory, and
        is offloaded and reloaded in name only.
        """
        self._tags[tag] = version
        self._memory_of[tag] = beside if empty else (tag, *beside)
        self.note(*self._memory_of[tag])

    def note(self, *memory: str) -> None:
        """Take the content of these tags of the saver, as far as the trainer has them, as known."""
        self._watch.note(*[name for name in self._memory(tuple(self._tags)) if name in memory])

    def offload(
        self, *tags: str, wait: bool = True, into: str | None = None, peer: PeerSaver | None = None
    ) -> None:
        """Move the tags (none: all) to the host and free their memory, into this tag of the
        peer's, the engine of this device, as far as it needs it.

        wait: False begins to copy and returns; their memory is freed when the copy is there, and
        until then they must not be written.
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
            if memory := self._memory(chosen):  # of none the saver would pause all
                with handing_over(saver, peer, into) as release:
                    saver.pause(*memory, content="host", release=release)
        else:
            memory = self._memory([tag for tag in chosen if tag not in before])
            saver.backend.synchronize()  # what still writes the tags
            fresh, self._pinned = set(memory) - self._pinned, self._pinned | set(memory)
            done = self._thread.submit(_move_out, saver, memory, fresh)
            self._begun.append(_Overlapped(chosen, before, done=done))
        self._offloaded |= set(chosen)

    def reload(self, *tags: str, wait: Wait = True) -> None:
        """Bring the tags (none: all) back, bit-identical, at the same addresses. Out of memory
        changes nothing.

        wait: False returns at once, and they come behind what was begun before, as soon as there is
        room; where there is none until somebody waits for them, the tags stay offloaded. "memory"
        returns when they have memory; what touches their content waits for that (`await_content`).
        """
        if wait:
            self._end_begun()
        if wait is True:
            self.await_content()
        chosen, saver = self._chosen(tags), self._saver
        if memory := self._memory(chosen):
            if wait is True:  # of none the saver would resume all
                saver.resume(*memory)
            elif wait:
                back = tuple(tag for tag in chosen if self._is_offloaded(tag))
                if memory := self._memory(back):
                    self._prefetching.append(
                        (back, saver.begin_resume(*memory, order=self.order()))
                    )
            else:
                held = saver.report(others=False).tags
                needed = sum(held[tag].live_bytes for tag in memory)
                needed += _SPARE if saver.device.type == "cuda" else 0
                first = _OTHERS_TURN if self._begun else 0.0
                behind = tuple(each.done for each in self._begun)
                begun = _Overlapped(chosen, frozenset(self._offloaded), behind)
                self._thread.submit(self._prefetch, saver, begun, memory, needed, first)
                self._begun.append(begun)
        self._offloaded -= set(chosen)

    def await_content(
        self, tensors: Sequence[Tensor] | None = None, streams: Sequence[torch.cuda.Stream] = ()
    ) -> None:
        """Wait for the content of these tensors (None: all) of tags that have memory; see
        `Prefetch.wait`. Tags whose content does not come are offloaded as before.
        """
        for each in tuple(self._prefetching):
            tags, prefetch = each
            try:
                prefetch.wait(tensors, streams)
            except BackendError:
                self._prefetching.remove(each)
                self._offloaded.update(tags)
                raise
            if tensors is None:
                self._prefetching.remove(each)

    @held()  # an interrupt in the middle of a look would leave a future locked
    def _end_begun(self) -> None:
        """Wait for the copies out of what was begun, and for the memory of what comes back."""
        if self._begun:
            self._saver.backend.require_own_process()  # the thread is not there in a forked child
        for each in self._begun:
            each.awaited.set()
        while wait([each.done for each in self._begun], _LOOK).not_done:
            deliver()  # which leaves it begun
        for each in tuple(self._begun):
            if (error := each.done.exception()) is None:
                if (prefetch := each.done.result()) is not None:
                    self._prefetching.append((each.tags, prefetch))
                self._begun.remove(each)
                continue
            self._offloaded = self._offloaded.difference(each.tags) | each.before.intersection(
                each.tags
            )
            # a pause may have come before what failed
            self._offloaded.update(filter(self._is_offloaded, each.tags))
            self._begun.remove(each)
            short = isinstance(error, OutOfMemory) and not isinstance(error, HostMemoryError)
            if not (short and each.before.issuperset(each.tags)):  # a reload may be tried again
                raise error

    def close(self) -> None:
        """Wait for what was begun, whatever becomes of it; nothing can be begun any more."""
        self._thread.shutdown()

    def require(
        self, method: str, *tags: str, prefetching: bool = False, undefined: bool = False
    ) -> None:
        """Raise a StateError if one of these is offloaded, or others have discarded its content and
        it may not be `undefined`; a tag that the trainer has not got is none of its business.

        Waits for all of their content, but if it may be `prefetching`: who touches it waits then.
        """
        if any(set(tags) & set(each.tags) for each in self._begun):
            self._end_begun()
        if not prefetching and any(set(tags) & set(back) for back, _ in self._prefetching):
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
                    "call load_checkpoint(), or make the trainer anew"
                )

    def _is_offloaded(self, tag: str) -> bool:
        """Return whether the tag counts as offloaded, or is paused in truth."""
        return tag in self._offloaded or any(map(self._saver.is_paused, self._memory_of[tag]))

    def _prefetch(
        self, saver: MemorySaver, begun: _Overlapped, tags: Sequence[str], needed: int, pause: float
    ) -> None:
        """Resume the tags where there is room; else looks again, until somebody waits for them."""
        try:
            awaited, due = begun.awaited.wait(pause), all(each.done() for each in begun.behind)
            if due and (awaited or saver.free_bytes >= needed):
                with contextlib.nullcontext() if awaited else contextlib.suppress(OutOfMemory):
                    return begun.done.set_result(saver.begin_resume(*tags, order=self.order()))
            # not a loop: at the end of Python, or of the trainer, no more work is taken
            self._thread.submit(self._prefetch, saver, begun, tags, needed, _LOOK)
        except BaseException as error:
            begun.done.set_exception(error)

    def _memory(self, tags: Sequence[str]) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self._memory_of[tag] for tag in tags))

    def _chosen(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        for tag in tags:
            if tag not in self._tags:
                raise ValueError(
                    f"unknown tag {tag!r}; the trainer has {', '.join(map(repr, self._tags))}"
                )
        return tags or tuple(self._tags)


def _move_out(saver: MemorySaver, tags: Sequence[str], fresh: Collection[str]) -> None:
    """Pause each tag as soon as its copy is there; between the calls others find the saver free.

    Nothing is queued that concerns the tags, and nobody writes them meanwhile.
    """
    _pin(saver, fresh)
    copies = [saver.save(tag, ("begun", time.monotonic_ns())) for tag in tags]
    for tag, copy in zip(tags, copies, strict=True):
        if copy is not None:
            copy.synchronize()
        saver.pause(tag, content="host", streams=())


def _pin(saver: MemorySaver, tags: Collection[str]) -> None:
    """Pin beforehand what copies of these tags take: a save would hold the saver for seconds."""
    held = saver.report(others=False).tags
    arena = saver.pinned_arena
    arena.give(arena.take(sum(held[tag].live_bytes for tag in tags)))


def reserve_offload(config: TrainerConfig, ranks: int, saver: MemorySaver) -> None:
    """Begin to obtain the host memory that one of `ranks` ranks offloads `config.leaving` in,
    beside what comes next. Nothing more where that was begun before.
    """
    if sizes := offloaded_bytes(config, ranks):
        saver.reserve_host(sizes)


def offloaded_bytes(config: TrainerConfig, ranks: int) -> dict[str, int]:
    """Return the host bytes that copies of `config.leaving` take on one of `ranks` ranks, by tag,
    from the model's config.json alone. The critic is taken for as large as the policy.
    """
    if not config.leaving:
        return {}
    params = list(meta_model(config).parameters())
    trained = [param for param in params if param.requires_grad]
    own, computing = config.torch_dtype.itemsize, config.torch_param_dtype.itemsize
    sizes = {
        PARAMS: _held(params, ranks),
        OPTIM: 0 if config.optimizer_offload else 2 * _held(trained, ranks),
        CRITIC: _held(params, ranks, own),
        CRITIC_OPTIM: 2 * _held(params, ranks, own),
        REFERENCE: _held(params, ranks, computing),
    }
    return {tag: sizes[tag] for tag in config.leaving}


def _held(params: Iterable[nn.Parameter], ranks: int, itemsize: int | None = None) -> int:
    """Return the bytes of a rank's rows. itemsize: of an element; None: as the model has it."""
    total = 0
    for param in params:
        rows = -(-param.shape[0] // ranks)
        elements = rows * param[0].numel()
        total += round_up(elements * (itemsize or param.element_size()), ALIGN)
    return total
