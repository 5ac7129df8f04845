"""A weight sync without copies: engines on the trainer's device serve the trainer's own pages.

    prepare   check the version, wait for the optimizer step; the first time, digest the parameters
    alias     every engine maps the pages, and verifies them if there is a digest

The ranks agree after each stage, as in a sync by copies (`weight_sync.py`). A stage that fails ends
the sync on all ranks: engines that have aliased the pages return them and serve nothing. While an
engine serves the pages, its lease prevents the trainer from offloading or changing its parameters.
"""

import contextlib
import time
from collections.abc import Mapping
from itertools import chain, product

import torch
from torch import Tensor

from memsaver import MemorySaver
from memsaver.ops.layout import row_major
from memsaver.ops.rows import digest_table
from rollout.protocols import UpdatableEngine
from rollout.weights import Manifest, ParamSlice, UpdateReceipt, WeightLayout
from trainer_bridge.errors import listed
from trainer_bridge.sync.plan import make_plan
from trainer_bridge.sync.shards import shard_of
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync, abort_all, buffer_values


class PageAlias:
    """Pages of one tag that the engines of a sync serve. Its methods are collective calls.

    The parameters are laid out on the tag as in `layout`. An engine whose weights have another
    layout refuses the pages. `sync` copies whole parameters to engines on the saver's device.
    Buffers are not on the pages, so they are copied as in this sync.
    """

    def __init__(self, saver: MemorySaver, tag: str, layout: Manifest, sync: WeightSync) -> None:
        self._saver, self._tag, self._layout, self._sync = saver, tag, layout, sync
        self._buffers: dict[str, Tensor] = {}
        self._version: int | None = None

    def holds(self) -> bool:
        """Return whether all engines serve the pages that were shared last."""
        return self._sync.served(self._version)

    def end(self) -> None:
        """Let engines that still serve the pages give them back, before their owner ends."""
        for target in self._sync.targets if self._saver.leases(self._tag) else ():
            with contextlib.suppress(Exception):  # The engine may be gone, and its lease with it.
                target.abort_update("the trainer whose pages it served was closed")

    def share(self, version: int) -> SyncReceipt:
        """Serve the current parameters on all targets, from the trainer's pages.

        The first call digests the parameters, and every engine reads them back through its own
        addresses. Later calls only compare hashes of the layouts: nothing is written, so there is
        nothing to verify. `version` must not be lower than that of the last call.

        The receipt has nbytes 0. It has digests and verify_seconds (mapping included) only if the
        engines read the parameters. Errors are those of `Agreement.agree`.
        """
        started, stages = time.perf_counter(), dict[str, float]()
        prepared = self._sync.agreement.agree("prepare", lambda: self._prepare(version))
        stages["prepare"] = time.perf_counter() - started
        digests = [digest for digest in prepared if digest is not None]
        asked: list[UpdatableEngine] = []
        try:
            receipts = self._sync.agreement.agree(
                "alias", lambda: self._alias(version, prepared[self._sync.agreement.rank], asked)
            )
        except BaseException as error:
            abort_all(asked, error)
            raise
        seconds = time.perf_counter() - started
        stages["alias"] = seconds - stages["prepare"]
        self._version = version
        updates = chain.from_iterable(receipts)
        slowest = max((receipt.seconds for receipt in updates), default=0.0)
        return SyncReceipt(
            version=version,
            digests=tuple(digest for digest, _ in product(digests, self._sync.targets)),
            seconds=seconds,
            verify_seconds=slowest if digests else 0.0,
            stages=stages,
        )

    def _prepare(self, version: int) -> int | None:
        """Wait for writes of the parameters, and return their digest if engines will verify it."""
        if self._version is not None and version < self._version:
            text = f"version {version} is stale: version {self._version} has been shared"
            raise ValueError(f"{text}; use a higher one")
        sources = self._sync.sources()
        self._buffers = buffer_values(sources, self._sync.buffers)
        if self._saver.device.type == "cuda":
            torch.cuda.synchronize(self._saver.device)  # another process reads the pages next
        if self._version is not None:
            return None
        numbers = {piece.name: piece.index_base for piece in self._layout.slices}
        stored = {name: self._layout.aliases.get(name, name) for name in sources}
        params = [name for name in sources if name not in self._sync.buffers]
        return digest_table([(sources[name], numbers[stored[name]]) for name in params]).run()

    def _alias(
        self, version: int, digest: int | None, asked: list[UpdatableEngine]
    ) -> list[UpdateReceipt]:
        ticket, receipts = self._saver.share(self._tag), []
        for target in self._sync.targets:
            asked.append(target)  # before the call, which may fail halfway
            receipts.append(
                target.alias_update(
                    version, ticket, self._layout.layout_hash, digest, self._buffers
                )
            )
        return receipts


def byte_offsets(layout: Manifest, params: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the offset, in bytes from the start of the tag, of each of the trainer's parameters.

    `layout` is of an engine's weights, and stores tied parameters under one name. `params` are
    whole, by the trainer's names, on any device, including meta. A ValueError lists names, shapes,
    dtypes and strides that differ, and parameters of which the layout holds only parts.
    """
    shards = [shard_of(name, param, 0) for name, param in params.items()]
    plan = make_plan(shards, [""], [WeightLayout(manifest=layout, place="")])
    misfits = ((name, _misfit(piece, params[name])) for name, piece, *_ in plan.slices)
    problems = [f"{name}: {problem}" for name, problem in misfits if problem is not None]
    if layout.zeros:
        problems.append("the rollout's layout has padding, like one rank of several")
    if problems:
        rule = "the trainer's parameters cannot be laid out like the rollout's"
        raise ValueError(f"{rule}: {listed(problems)}; omit layout, and sync by copies")
    return {name: piece.offset for name, piece, *_ in plan.slices}


def _misfit(piece: ParamSlice, param: Tensor) -> str | None:
    shape = tuple(param.shape)
    if piece.shape != shape:
        return f"the rollout has a part {piece.shape} of {shape}"
    if piece.strides != row_major(shape):
        return "its elements are not adjacent in the rollout"
    if piece.torch_dtype != param.dtype:
        return f"{param.dtype} in the trainer, {piece.torch_dtype} in the rollout"
    return None
