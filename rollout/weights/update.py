"""The engine's side of a weight update: offer pages, verify, and commit; or alias other pages.

    state     begin  verify                   commit           alias    abort       weights sleep
    closed    open   -                        -                aliased  closed      closed
    open [4]  open   verified, or closed [1]  -                aliased  closed      closed
    verified  open   -                        closed, defined  aliased  closed      closed
    aliased   - [2]  -                        -                aliased  closed [3]  closed [3]

"-" raises a WeightUpdateError and changes nothing. [1] The pages differ from the receipt; there is
no second try. [2] A StateError. [3] The pages go back to the trainer, and the weights sleep,
undefined. [4] Only here is `write` legal, for writers that cannot map the pages.

What the engine serves after an update without a commit depends on the pages that were offered. With
shadow pages it serves the old version all the time. With the served pages themselves it is poisoned
from `begin` on: it serves nothing until an update commits.

An abort without an open update also poisons the engine, unless the last update was a shadow update
that was not committed. So an abort that is sent to all engines, including engines that refused or
rolled back the shadow update, leaves the old version in all of them.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from memsaver import ContentWatch, LeaseError, MemorySaver, Release, StateError, Ticket
from memsaver.content_watch import lost_by_others, shortfall
from rollout.errors import WeightUpdateError
from rollout.tag_names import WEIGHTS_SHADOW
from rollout.weights.messages import PackedBox, UpdateReceipt, WeightOffer, WriteReceipt
from rollout.weights.pages import ShadowPages, TrainerPages, WeightPages, shorten


@dataclass(frozen=True, kw_only=True)
class _Open:
    """An open update."""

    version: int
    shadow: bool  # whether shadow pages were offered
    names: tuple[str, ...] | None  # the only parameters that will be written; None: all
    nbytes: int  # of the parameters that will be written
    digest: int | None = None  # read back; None before the verification
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # values for the commit


class WeightUpdate:
    """State machine of an engine's weight updates, with the states above.

    The caller must not run a forward during `commit` and `alias`, or during `begin` without shadow.
    See `Engine.begin_update`, `Engine.alias_update` and so on for arguments and errors.
    """

    def __init__(
        self, store: WeightPages, saver: MemorySaver, on_new_weights: Callable[[], None]
    ) -> None:
        """Start without an open update.

        `on_new_weights` is called when cached keys and values become stale because the weights
        change.
        """
        self._store = store
        self._saver = saver
        self._on_new_weights = on_new_weights
        self._shadow = ShadowPages(store, saver)
        self._aliased = TrainerPages(store, saver)
        self._watch = ContentWatch(saver)
        self._open: _Open | None = None
        self._spared = False  # whether the last update was a shadow update without a commit

    def begin(
        self, version: int, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer:
        """Offer pages for a new version; this replaces an open update."""
        if self._open is None:
            self._spared = shadow
        require_active(self._saver, self._store.tag, "begin a weight update")
        self.require_own("begin a weight update")
        self._check_version(version)
        chosen = None if names is None else self._choose(names)
        if shadow:
            self._shadow.take()
        ticket = self._saver.share(self._pages_tag(shadow), writable=True)
        # This ends an open update. A new shadow update uses the same pages.
        self._open, self._spared = None, shadow
        if not shadow:
            self._on_new_weights()
            self._poison(f"the update to version {version} has not been committed")
            self._free_shadow()
        elif chosen is not None:
            self._shadow.copy_all()
        self._watch.note(self._pages_tag(shadow))
        nbytes = self._nbytes(chosen)
        self._open = _Open(version=version, shadow=shadow, names=chosen, nbytes=nbytes)
        return WeightOffer(
            version=version,
            layout_hash=self._store.manifest.layout_hash,
            nbytes=self._store.manifest.nbytes,
            ticket=ticket,
            shadow=shadow,
            names=chosen,
        )

    def write(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """Copy boxes of a message to the offered pages, for a writer that cannot map them."""
        update = self._unverified("write into a weight update")
        pages = self._shadow.arena if update.shadow else self._store.arena
        write_boxes(pages, boxes, data, self._store.base)

    def verify(self, receipt: WriteReceipt) -> UpdateReceipt:
        """Read the written pages back and compare them with the receipt."""
        started = time.perf_counter()
        update = self._unverified("verify a weight update")
        pages = self._shadow.arena if update.shadow else None
        digest = self._store.digest(pages, update.names)
        claims = {
            "version": (receipt.version, update.version),
            "layout_hash": (receipt.layout_hash, self._store.manifest.layout_hash),
            "nbytes": (receipt.nbytes, update.nbytes),
            "digest": (receipt.digest, digest),
            "buffers": self._shapes(receipt.buffers),
        }
        if wrong := [
            f"{key} {theirs} is {ours} here"
            for key, (theirs, ours) in claims.items()
            if theirs != ours
        ]:
            text = f"the update to version {update.version} failed verification"
            reason = f"{text}: the writer's {', '.join(wrong)}"
            self._close(reason)
            raise WeightUpdateError(f"{reason}; {self._consequence()}")
        seen = self._store.digest_saw_finite
        if names := () if seen else self._store.not_finite(pages, update.names):
            reason = (
                f"the update to version {update.version} has NaN or infinity in {shorten(names)}: "
                f"the trainer's values are not finite, or exceed the range of the engine's dtype"
            )
            self._close(reason)
            raise WeightUpdateError(f"{reason}; {self._consequence()}")
        self._open = replace(update, digest=digest, buffers=receipt.buffers)
        seconds = time.perf_counter() - started
        return UpdateReceipt(version=update.version, digest=digest, seconds=seconds)

    def commit(self, version: int) -> UpdateReceipt:
        """Serve the verified version."""
        started = time.perf_counter()
        update = self._required("commit a weight update")
        if update.digest is None:
            raise WeightUpdateError(
                f"the update to version {update.version} is not verified; call verify_update first"
            )
        if version != update.version:
            raise WeightUpdateError(
                f"version {version} is not verified, but version {update.version} is; commit that"
            )
        if update.shadow:
            self._shadow.exchange()
            self._on_new_weights()
        self._store.set_buffers(update.buffers, f"version {version}")
        self._store.define(version)
        self._open, self._spared = None, False
        self._free_shadow()
        seconds = time.perf_counter() - started
        return UpdateReceipt(version=version, digest=update.digest, seconds=seconds)

    def alias(
        self,
        version: int,
        ticket: Ticket,
        layout_hash: str,
        digest: int | None,
        buffers: Mapping[str, Tensor],
    ) -> UpdateReceipt:
        """Serve the pages of a ticket as a new version, and release the engine's own memory."""
        started = time.perf_counter()
        self._check_version(version)
        if layout_hash != (own := self._store.manifest.layout_hash):
            raise ValueError(
                f"the pages of version {version} are laid out as {layout_hash}, "
                f"these weights as {own}; make the trainer with layout=engine.manifest, or sync "
                "by copies"
            )
        theirs, ours = self._shapes(buffers)
        if theirs != ours:
            raise ValueError(f"version {version} has buffers {theirs}, these weights {ours}")
        self._aliased.require_possible()
        self._roll_back()
        self._aliased.empty()
        self._poison(f"the alias of version {version} did not finish")
        self._on_new_weights()
        try:
            self._aliased.take(ticket)
            if digest is not None and (read := self._store.digest()) != digest:
                raise WeightUpdateError(
                    f"the pages of version {version} have digest {read}, the trainer's digest is "
                    f"{digest}; the engine refuses to generate until an update commits"
                )
            self._store.set_buffers(buffers, f"version {version}")
            self._store.define(version)
        except BaseException as error:
            self._poison(f"version {version} could not be aliased: {type(error).__name__}: {error}")
            raise
        return UpdateReceipt(version=version, digest=digest, seconds=time.perf_counter() - started)

    def require_own(self, action: str) -> None:
        """Raise a StateError while the weights lie in the trainer's pages."""
        self._aliased.require_own(action)

    def abort(self, reason: str) -> None:
        """Close the update; the module docstring says which version is served then.

        A poisoned engine reports `reason`.
        """
        if self._open is not None or not self._spared:
            self._close(reason)

    def sleep(self, level: int, release: Release, on_discard: Callable[[], None]) -> None:
        """Pause the weights, and end an open update.

        Args:
            level: 1 keeps the content if it is defined and in the engine's own memory.
            release: Receiver of the memory, see `MemorySaver.pause`.
            on_discard: Called before the content is discarded.

        Raises:
            LeaseError: A process maps the weights, or a writer the shadow pages. Nothing changed,
                except that an open update with shadow pages may be rolled back.
        """
        self._roll_back()
        keep = level == 1 and self._store.version is not None and not self._aliased.held
        if not keep:
            on_discard()
        self._saver.pause(self._store.tag, content="host" if keep else "discard", release=release)
        if self._aliased.give_back():
            self._poison("a sleep gave the trainer's pages back; sync or share the weights again")
        elif level == 2:
            self._poison("the weights were discarded by sleep(level=2); commit a weight update")
        elif self._open is not None:
            self._poison(
                f"a sleep ended the update to version {self._open.version}; begin it again"
            )

    def _roll_back(self) -> None:
        """Roll an update with shadow pages back; a LeaseError changes nothing."""
        self._shadow.give_back()
        if self._open is not None and self._open.shadow:
            self._open, self._spared = None, True

    def _shapes(self, buffers: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shapes of a writer's buffers, and of the engine's buffers of these names."""
        known = self._store.buffers
        theirs = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        return theirs, {name: tuple(known[name].shape) for name in theirs if name in known}

    def _close(self, reason: str) -> None:
        if self._open is None or not self._open.shadow:
            self._poison(reason)
            return
        self._open, self._spared = None, True
        self._free_shadow()

    def _poison(self, reason: str) -> None:
        self._open, self._spared = None, False
        self._store.undefine(reason)
        self._aliased.give_back()

    def _check_version(self, version: int) -> None:
        if version < self._store.last_version:
            last = self._store.last_version
            raise ValueError(
                f"version {version} is older than the engine's version {last}; use a higher one"
            )

    def _free_shadow(self) -> None:
        # A writer that hangs may still map the pages. Only a sleep must wait for it.
        with contextlib.suppress(LeaseError):
            self._shadow.give_back()

    def _required(self, action: str) -> _Open:
        require_active(self._saver, self._store.tag, action)
        if self._open is None:
            raise WeightUpdateError("no weight update is open; call begin_update first")
        pages = self._pages_tag(self._open.shadow)
        if self._watch.lost(pages) or self._saver.is_paused(pages):
            reason = f"the update to version {self._open.version} is lost: "
            reason += lost_by_others([pages], "engine")
            self._close(reason)
            raise WeightUpdateError(f"{reason}; begin it again; {self._consequence()}")
        return self._open

    def _pages_tag(self, shadow: bool) -> str:
        return WEIGHTS_SHADOW if shadow else self._store.tag

    def _unverified(self, action: str) -> _Open:
        update = self._required(action)
        if update.digest is not None:
            raise WeightUpdateError(
                f"the update to version {update.version} is verified already; commit or abort it"
            )
        return update

    def _consequence(self) -> str:
        if self._store.version is None:
            return "the engine refuses to generate until an update commits"
        return f"the engine still serves version {self._store.version}"

    def _choose(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the stored names of the given parameters, or raise if they cannot be updated."""
        stored = [self._store.manifest.aliases.get(name, name) for name in names]
        known = self._store.shapes
        if unknown := [name for name, own in zip(names, stored, strict=True) if own not in known]:
            raise ValueError(
                f"the model has no parameters {', '.join(unknown[:5])} ({len(unknown)} in total)"
            )
        if not stored:
            raise ValueError(
                "names is empty; name the parameters that will be written, or pass None for all"
            )
        if self._store.version is None:
            raise StateError(
                f"cannot update some parameters only: {self._store.undefined_reason}; "
                f"update all of them first"
            )
        return tuple(dict.fromkeys(stored))

    def _nbytes(self, names: tuple[str, ...] | None) -> int:
        if names is None:
            return self._store.param_nbytes
        chosen = frozenset(names)
        return sum(piece.nbytes for piece in self._store.manifest.slices if piece.name in chosen)


def write_boxes(pages: Tensor, boxes: Sequence[PackedBox], data: Tensor, base: int = 0) -> None:
    """Copy every box of a message to its place, on the current stream of the pages' device.

    `pages` and `data` are uint8 and contiguous, `data` on the CPU. The pages begin at byte `base`
    of the tag's arena. A WeightUpdateError names a box outside of the pages or of `data`; nothing
    was written.
    """
    last = base + pages.numel()
    for box in boxes:
        inside = base <= box.offset <= box.end <= last
        if not inside or not 0 <= box.at <= data.numel() - box.nbytes:
            raise WeightUpdateError(
                f"{box} is outside of the weights (bytes {base} to {last}) or of the "
                f"{data.numel()} bytes of its message; nothing was written"
            )
    message = data.to(pages.device)
    for box in boxes:
        elements = message[box.at : box.at + box.nbytes].view(box.torch_dtype)
        box.view(pages, base).copy_(elements.view(box.shape))


def require_active(saver: MemorySaver, tag: str, action: str) -> None:
    """Raise a StateError if the tag is paused or parts of it have no memory."""
    if saver.is_paused(tag):
        raise StateError(f"cannot {action}: tag {tag} is paused; call wake_up([{tag!r}]) first")
    if lacking := shortfall(saver, [tag]):
        raise StateError(f"cannot {action}: {lacking}")
