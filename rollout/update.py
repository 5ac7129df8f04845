"""The engine's side of a weight update: offer the pages, read them back, commit or refuse."""

import time
from typing import TYPE_CHECKING

from rollout.errors import WeightUpdateError
from rollout.types import CommitReceipt, WeightOffer, WriteReceipt
from rollout.weights import WeightStore

if TYPE_CHECKING:
    from memsaver import MemorySaver


class WeightUpdate:
    """Two phases: closed -> begin -> open -> commit -> closed. Every other way out leaves the weights undefined."""

    def __init__(self, store: WeightStore, saver: "MemorySaver") -> None:
        self._store = store
        self._saver = saver
        self._pending: int | None = None

    def begin(self, version: int) -> WeightOffer:
        """Offer the pages for `version`; a second begin replaces an open one. ValueError for an older version."""
        if version < self._store.last_version:
            raise ValueError(
                f"version {version} is older than the engine's version {self._store.last_version}; use a higher one"
            )
        ticket = self._saver.share(self._store.tag, writable=True)
        self.abort(f"the update to version {version} has not been committed")
        self._pending = version
        return WeightOffer(version=version, manifest=self._store.manifest, ticket=ticket)

    def commit(self, receipt: WriteReceipt) -> CommitReceipt:
        """Define the pending version if the pages hold what the receipt says; WeightUpdateError otherwise."""
        started = time.perf_counter()
        if self._pending is None:
            raise WeightUpdateError("no weight update is open; call begin_update first")
        digest = self._store.digest()
        claims = {
            "version": (receipt.version, self._pending),
            "layout_hash": (receipt.layout_hash, self._store.manifest.layout_hash),
            "nbytes": (receipt.nbytes, self._store.param_nbytes),
            "digest": (receipt.digest, digest),
        }
        if wrong := [f"{key} {theirs} is {ours} here" for key, (theirs, ours) in claims.items() if theirs != ours]:
            reason = f"the update to version {self._pending} failed verification: the writer's {', '.join(wrong)}"
            self.abort(reason)
            raise WeightUpdateError(f"{reason}; the engine refuses to generate until an update commits")
        self._pending = None
        self._store.define(receipt.version)
        return CommitReceipt(version=receipt.version, digest=digest, seconds=time.perf_counter() - started)

    def abort(self, reason: str) -> None:
        """Close the update, if one is open, with undefined weights."""
        self._pending = None
        self._store.undefine(reason)
