"""Pages of weights: an engine's own, shadow pages for updates, and aliased pages of the trainer.

A new version is written into shadow pages while the engine serves the present one. Aliased pages
need no copy: two tags map the same memory.
"""

import math
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
    """Weights on a tag, as a manifest describes them, with their version.

    The tensors belong to an engine, which may be another project's.

    Attributes:
        base: Byte of the manifest at which `arena` starts; of the tag, unless the manifest is also
            that of other arenas.
        param_nbytes: Bytes of the parameters that this rank stores, without padding.
        arena: uint8, all weights with padding, from byte `base` of the tag on.
        shapes: Shapes of the checkpoint's whole parameters, tied ones once, including parameters of
            which this rank stores nothing.
        buffers: Tensors other than parameters (router biases). A sleep keeps them, and an update
            may replace them.
        last_version: The last version that was defined.
    """

    def __init__(
        self,
        manifest: Manifest,
        shapes: Mapping[str, tuple[int, ...]],
        arena: Tensor,
        saver: MemorySaver,
        base: int | None = None,
    ) -> None:
        """Describe weights that lie on a tag; they are undefined.

        `arena` is uint8. It starts at or before the manifest's first slice, and reaches at least to
        the manifest's end.
        """
        self.tag = saver.tag_of(arena)
        self.base = saver.offset_of(arena) if base is None else base
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
        """Return the version; None while the content is undefined, or was discarded by others."""
        return None if self._watch.lost(self.tag) else self._version

    @property
    def undefined_reason(self) -> str:
        """Return why `version` is None."""
        if self._version is not None and (lost := self._watch.lost(self.tag)):
            return f"{lost_by_others(lost, 'engine')}; commit a weight update"
        return self._reason

    def define(self, version: int) -> None:
        """Declare that the content is this version, and zero the padding."""
        for offset, nbytes in self.manifest.zeros:
            self.arena[offset - self.base : offset - self.base + nbytes].zero_()
        self._version = self.last_version = version
        self._reason = ""
        self._watch.note(self.tag)

    def undefine(self, reason: str) -> None:
        self._version, self._reason = None, reason

    def set_buffers(self, values: Mapping[str, Tensor], source: str) -> None:
        """Replace the values of known buffers.

        A ValueError names a buffer of another shape, and the `source` of the values.
        """
        for name, value in values.items():
            buffer = self.buffers[name]
            if value.shape != buffer.shape:
                text = f"{name} has shape {tuple(value.shape)}, config.json asks for"
                raise ValueError(f"{source}: {text} {tuple(buffer.shape)}")
            buffer.copy_(value)

    def digest(self, arena: Tensor | None = None, names: Collection[str] | None = None) -> int:
        """Compute the digest of the slices in memory, without padding.

        On a GPU this takes one launch per kind of slice, and one wait. `arena` has other pages with
        the same layout, uint8, as long as the store's arena. `names` restricts the digest to these
        parameters or tied names, which must exist.
        """
        arena = self.arena if arena is None else arena
        assert arena.shape == self.arena.shape
        wanted = frozenset(
            self.shapes if names is None else (self.manifest.aliases.get(n, n) for n in names)
        )
        assert wanted <= self.shapes.keys()
        # Offsets are fixed, so the tables for the last names are kept.
        if self._digest is None or self._digest[0] != wanted:
            pieces = (piece for piece in self.manifest.slices if piece.name in wanted)
            rows = [_rows(piece, self.base) for piece in pieces]
            self._digest = wanted, RowCopies(rows, self.arena.device)
        return self._digest[1].run(arena)

    def not_finite(
        self, arena: Tensor | None = None, names: Collection[str] | None = None
    ) -> list[str]:
        """Return the parameters in memory with NaN or infinity, in one pass and with one wait.

        Parameters of one byte per element, which other projects' engines have, are left out. After
        a digest of the same pages, `digest_saw_finite` spares this pass.

        `arena` and `names` are as for `digest`, but names are not tied ones.
        """
        arena = self.arena if arena is None else arena
        chosen = self.shapes if names is None else names
        pieces = [piece for piece in self.manifest.slices if piece.name in chosen and piece.nbytes]
        pieces = [piece for piece in pieces if piece.torch_dtype.itemsize > 1]
        boxes = [piece.view(arena, self.base) for piece in pieces]
        if not boxes:
            return []
        peaks = torch.stack([peak.float() for peak in torch._foreach_norm(boxes, math.inf)])
        pairs = zip(pieces, peaks.isfinite().tolist(), strict=True)
        return list(dict.fromkeys(piece.name for piece, finite in pairs if not finite))

    @property
    def digest_saw_finite(self) -> bool:
        """Return whether the last `digest` also saw that every element is finite."""
        return self._digest is not None and self._digest[1].seen_finite

    def box(self, piece: ArenaBox) -> Tensor:
        """Return a view of a slice, with its strides, or of a fused tensor."""
        return piece.view(self.arena, self.base)


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """Join the first names for a message, with the number of further names."""
    names = list(names)
    if not names:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _rows(piece: ParamSlice, base: int) -> Rows:
    """Return the rows of a slice, with the elements' numbers in the digest.

    The rows' offsets count from byte `base` of the tag's arena.
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


def require_alone(store: WeightPages, saver: MemorySaver, subject: str) -> None:
    """Raise a StateError if other tensors lie on the weights' tag.

    Such tensors would show the bytes of other pages. `subject` starts the message.
    """
    arena, tag = store.arena, store.tag
    if saver.offset_of(arena) or saver.report().tags[tag].live_bytes != arena.nbytes:
        raise StateError(
            f"{subject} need tag {tag} for the weights alone; place other tensors on another tag"
        )


class ShadowPages:
    """Second copy of the store's pages on tag `weights_shadow`, at the same offset.

    The tag has memory from `take` to `give_back`. Its address never changes, so that tables with
    addresses are built once.
    """

    def __init__(self, store: WeightPages, saver: MemorySaver) -> None:
        self._store = store
        self._saver = saver
        self._arena: Tensor | None = None

    @property
    def arena(self) -> Tensor:
        """Return the pages, uint8, as long as the store's arena."""
        assert self._arena is not None
        return self._arena

    def take(self) -> None:
        """Map memory behind the pages; their content is undefined.

        An OutOfMemory, or a StateError because other tensors lie on the weights' tag, changes
        nothing.
        """
        if self._arena is None:
            require_alone(self._store, self._saver, "shadow pages")
            size = (self._store.arena.nbytes,)
            self._arena = self._saver.empty(size, torch.uint8, tag=WEIGHTS_SHADOW)
        elif self._saver.is_paused(WEIGHTS_SHADOW):
            self._saver.resume(WEIGHTS_SHADOW)

    def copy_all(self) -> None:
        """Copy the present weights, for an update that writes only some of them, and wait."""
        self.arena.copy_(self._store.arena)
        if self.arena.is_cuda:  # another process writes next
            torch.cuda.current_stream(self.arena.device).synchronize()

    def exchange(self) -> None:
        """Exchange the store's pages and the shadow pages, after waiting for the device's work.

        Raises:
            LeaseError: A process maps either of them. Nothing changed.
        """
        self._saver.exchange(self._store.tag, WEIGHTS_SHADOW)

    def give_back(self) -> None:
        """Release the memory, if there is any, to the driver.

        Raises:
            LeaseError: A writer still maps the pages.
        """
        if self._arena is not None:
            self._saver.pause(WEIGHTS_SHADOW, content="discard")


class TrainerPages:
    """Another saver's pages, which replace the store's own memory from `take` to `give_back`."""

    def __init__(self, store: WeightPages, saver: MemorySaver) -> None:
        self._store = store
        self._saver = saver
        self._alone = False
        self._taken = False
        self._watch = ContentWatch(saver)

    @property
    def held(self) -> bool:
        """Return whether the tag is active with aliased pages."""
        return self._taken and not self._watch.lost(self._store.tag)

    def require_possible(self) -> None:
        """Raise a StateError if other tensors lie on the tag; they would show the trainer's bytes.

        The tag is checked once: a report takes milliseconds where torch's caches are large.
        """
        if not self._alone:
            require_alone(self._store, self._saver, "aliased pages")
            self._alone = True

    def require_own(self, action: str) -> None:
        """Raise a StateError while the weights lie in aliased pages."""
        if self.held:
            raise StateError(
                f"cannot {action}: the weights lie in the trainer's pages; "
                f"call sleep(tags=[{self._store.tag!r}]) to give them back, and wake_up to map the "
                "engine's own memory"
            )

    def empty(self) -> None:
        """Release the memory behind the tag, whether it is the store's own or aliased.

        Raises:
            LeaseError: A process maps it. Nothing changed.
        """
        self._saver.pause(self._store.tag, content="discard")
        self._taken = False

    def take(self, ticket: Ticket) -> None:
        """Map the ticket's pages behind the tag, which is empty."""
        self._saver.alias(self._store.tag, ticket)
        self._taken = True
        self._watch.note(self._store.tag)

    def give_back(self) -> bool:
        """Give aliased pages back, which pauses the tag; return whether there were any."""
        # If another user of the saver paused and resumed the tag, it has the store's own memory.
        if not self.held and not (self._taken and self._saver.is_paused(self._store.tag)):
            return False
        self.empty()
        return True
