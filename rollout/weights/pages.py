"""Weights as they lie in an arena: what is where, whether they are some version, their digest.

Pages beside the store's own: second ones, into which a version is written while the one before is
still served; and the trainer's, where nothing is written or copied, and two tags show one memory.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from memsaver import ContentWatch, MemorySaver, StateError, Ticket
from memsaver.content_watch import lost_by_others
from memsaver.ops.layout import row_major
from memsaver.ops.rows import RowCopies, Rows, box_rows, dot
from rollout.tag_names import WEIGHTS_SHADOW
from rollout.weights.messages import ArenaBox, Manifest, ParamSlice


class WeightPages:
    """Bytes of a tag that a manifest describes, whoever made the tensors there.

    Attributes:
        arena: uint8, all of the weights, padding included, from byte `base` of the tag on.
        shapes: Of the checkpoint's parameters, whole, tied ones once; also of those of which this
            rank stores nothing.
        buffers: What the model computes with beside the parameters (router biases), which a sleep
            never loses, and an update may replace.
        last_version: The last version that was defined.
        version: None while the content is undefined, also where others have discarded it.
        undefined_reason: Why `version` is None.
    """

    def __init__(
        self,
        manifest: Manifest,
        shapes: Mapping[str, tuple[int, ...]],
        arena: Tensor,
        saver: MemorySaver,
    ) -> None:
        """shapes: of the checkpoint's parameters, whole, tied ones once. arena: uint8, of a tag of
        the saver, from before the first slice at least to the end of the manifest.
        """
        self.tag, self.base = saver.tag_of(arena), saver.offset_of(arena)
        self.manifest = manifest
        self.param_nbytes = sum(piece.nbytes for piece in manifest.slices)
        self.arena = arena
        self.buffers: dict[str, Tensor] = {}
        self.shapes = dict(shapes)
        self.last_version = 0
        self._version: int | None = None
        self._reason = "the weights were never loaded; commit a weight update"
        self._watch = ContentWatch(saver, self.tag)
        self._digest: tuple[frozenset[str], RowCopies] | None = None

    @property
    def version(self) -> int | None:
        return None if self._watch.lost(self.tag) else self._version

    @property
    def undefined_reason(self) -> str:
        if self._version is not None and (lost := self._watch.lost(self.tag)):
            return f"{lost_by_others(lost, 'engine')}; commit a weight update"
        return self._reason

    def define(self, version: int) -> None:
        for offset, nbytes in self.manifest.zeros:
            self.arena[offset - self.base : offset - self.base + nbytes].zero_()
        self._version = self.last_version = version
        self._reason = ""
        self._watch.note(self.tag)

    def undefine(self, reason: str) -> None:
        self._version, self._reason = None, reason

    def set_buffers(self, values: Mapping[str, Tensor], source: str) -> None:
        """Replace buffers that the model has; a ValueError names one of another shape."""
        for name, value in values.items():
            buffer = self.buffers[name]
            if value.shape != buffer.shape:
                text = f"{name} has shape {tuple(value.shape)}, config.json asks for"
                raise ValueError(f"{source}: {text} {tuple(buffer.shape)}")
            buffer.copy_(value)

    def digest(self, arena: Tensor | None = None, names: Collection[str] | None = None) -> int:
        """Digest of the slices as they lie in memory, padding left out. One launch a kind on a GPU,
        and one wait.

        arena: uint8, as long as the store's own: other pages with the same layout. names: of these
        parameters (or tied names) only, which the model has.
        """
        arena = self.arena if arena is None else arena
        assert arena.shape == self.arena.shape
        wanted = frozenset(
            self.shapes if names is None else (self.manifest.aliases.get(n, n) for n in names)
        )
        assert wanted <= self.shapes.keys()
        # offsets are fixed: tables are made once
        if self._digest is None or self._digest[0] != wanted:
            pieces = (piece for piece in self.manifest.slices if piece.name in wanted)
            rows = [_rows(piece, self.base) for piece in pieces]
            self._digest = wanted, RowCopies(rows, self.arena.device)
        return self._digest[1].run(arena)

    def box(self, piece: ArenaBox) -> Tensor:
        """Return a view of a slice, with its strides, or of a fused tensor."""
        return piece.view(self.arena, self.base)


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    if not names:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _rows(piece: ParamSlice, base: int) -> Rows:
    """Return the elements of a slice, with their numbers in the whole parameter; byte offsets count
    from byte `base`.
    """
    numbers = row_major(piece.global_shape)
    return box_rows(
        piece.shape,
        piece.torch_dtype,
        offset=piece.offset - base,
        strides=piece.strides,
        index=piece.index_base + dot(piece.start, numbers),
        index_strides=numbers,
    )


def require_alone(store: WeightPages, saver: MemorySaver, what: str) -> None:
    """StateError unless the weights have their tag for themselves: whoever else lies there would
    see the bytes of other pages.
    """
    arena, tag = store.arena, store.tag
    if saver.offset_of(arena) or saver.report().tags[tag].live_bytes != arena.nbytes:
        raise StateError(
            f"{what} need tag {tag} for the weights alone; place the other tensors on another tag"
        )


class ShadowPages:
    """Pages of as many bytes as the store's arena, at the same offset of a tag of their own.

    They have memory from `take` to `give_back`. Their address is the same each time: tables that
    hold it are made once.
    """

    def __init__(self, store: WeightPages, saver: MemorySaver) -> None:
        self._store = store
        self._saver = saver
        self._arena: Tensor | None = None

    @property
    def arena(self) -> Tensor:
        """uint8, as long as the store's."""
        assert self._arena is not None
        return self._arena

    def take(self) -> None:
        """Put memory behind the pages, content undefined.

        OutOfMemory, StateError: nothing was changed.
        """
        if self._arena is None:
            require_alone(self._store, self._saver, "shadow pages")
            size = (self._store.arena.nbytes,)
            self._arena = self._saver.empty(size, torch.uint8, tag=WEIGHTS_SHADOW)
        elif self._saver.is_paused(WEIGHTS_SHADOW):
            self._saver.resume(WEIGHTS_SHADOW)

    def copy_all(self) -> None:
        """Copy the weights that are served, for an update that writes some of them only; waits."""
        self.arena.copy_(self._store.arena)
        if self.arena.is_cuda:  # another process goes on to write
            torch.cuda.current_stream(self.arena.device).synchronize()

    def exchange(self) -> None:
        """Makes the store's addresses show what was written, and these what was served. Waits for
        the device's work. LeaseError where a process maps either: nothing was changed.
        """
        self._saver.exchange(self._store.tag, WEIGHTS_SHADOW)

    def give_back(self) -> None:
        """The memory goes back to the driver; nothing happens without. LeaseError: a writer still
        maps it.
        """
        if self._arena is not None:
            self._saver.pause(WEIGHTS_SHADOW, content="discard")


class TrainerPages:
    """Another saver's pages behind the store's addresses, in place of its own memory, from `take`
    to `give_back`.
    """

    def __init__(self, store: WeightPages, saver: MemorySaver) -> None:
        self._store = store
        self._saver = saver
        self._alone = False
        self._taken = False
        self._watch = ContentWatch(saver)

    @property
    def held(self) -> bool:
        """Tells whether the tag is active with aliased pages."""
        return self._taken and not self._watch.lost(self._store.tag)

    def require_possible(self) -> None:
        """StateError where other tensors lie on the tag: they would show the trainer's bytes."""
        # asked once: a report costs milliseconds where torch's caches are large
        if not self._alone:
            require_alone(self._store, self._saver, "aliased pages")
            self._alone = True

    def require_own(self, action: str) -> None:
        """StateError while the weights lie in aliased pages."""
        if self.held:
            raise StateError(
                f"cannot {action}: the weights lie in the trainer's pages; "
                f"sleep(tags=[{self._store.tag!r}]) gives them back, wake_up takes memory "
                "of the engine's own"
            )

    def empty(self) -> None:
        """Give back what is behind the tag, own memory or aliased.

        LeaseError: a process maps it; nothing changed.
        """
        self._saver.pause(self._store.tag, content="discard")
        self._taken = False

    def take(self, ticket: Ticket) -> None:
        """Put the pages behind the tag, which is empty.

        ValueError, LeaseError: they cannot be had; nothing changed.
        """
        self._saver.alias(self._store.tag, ticket)
        self._taken = True
        self._watch.note(self._store.tag)

    def give_back(self) -> bool:
        """Gives aliased pages back; True when there were any, and the tag sleeps then."""
        # a tag that others paused and resumed has memory of its own, which stays
        if not self.held and not (self._taken and self._saver.is_paused(self._store.tag)):
            return False
        self.empty()
        return True
