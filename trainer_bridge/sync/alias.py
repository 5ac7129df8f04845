"""A sync that moves nothing: engines on the trainer's device serve the trainer's own pages.

    prepare   newer? the shards where they were?    waits for the step that made the weights,
                                                    perhaps digests them
    alias     every engine maps the pages           and reads them back, if there is a digest

Between the two the ranks agree, as for a sync by copies (`weight_sync.py`). A stage that fails ends
it everywhere: engines that have aliased the pages give them back and serve nothing. As long as an
engine serves them the trainer cannot offload its parameters, and must not change them: the lease is
what tells it.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product

import torch
from torch import Tensor

from memsaver import MemorySaver
from memsaver.ops.layout import row_major
from memsaver.ops.rows import RowCopies, digest_table
from rollout.protocols import UpdatableEngine
from rollout.weights import CommitReceipt, Manifest, ParamSlice
from trainer_bridge.errors import listed
from trainer_bridge.sync.agree import Agreement
from trainer_bridge.sync.weight_sync import SyncReceipt, abort_all, buffer_values, places


class PageAlias:
    """The pages of one tag that engines serve, version by version; all ranks call it together."""

    def __init__(
        self,
        saver: MemorySaver,
        tag: str,
        layout: Manifest,
        sources: Callable[[], Mapping[str, Tensor]],
        targets: Sequence[UpdatableEngine],
        agreement: Agreement | None = None,
        buffers: Sequence[str] = (),
    ) -> None:
        """tag: on which the parameters lie as `layout` says. sources: the parameters, whole, by
        name, asked for each time. targets: engines on the saver's device, which say no to another
        layout. buffers: the sources that are copied instead, as they lie in no page.
        """
        self._saver = saver
        self._tag = tag
        self._layout = layout
        self._sources = sources
        self._targets = tuple(targets)
        self._names = tuple(buffers)
        self._buffers: dict[str, Tensor] = {}
        self._agreement = agreement or Agreement()
        self._of: object = None  # where the parameters were the last time
        self._digest: RowCopies | None = None
        self._verified = False
        self._version: int | None = None

    def share(self, version: int, *, verify: bool | None = None) -> SyncReceipt:
        """Have every target serve the parameters as they are now, as `version`, in these very
        pages.

        verify: the parameters are digested here, and read back by every engine through its own
        addresses; None: the first time only. Without, the layouts' hashes are all that is compared:
        nothing is written, so nothing can be written wrongly. The receipt has nbytes 0, and digests
        and verify_seconds (mapping included) only where they were read. Raises what went wrong
        here, or a `SyncError` that names the stage, the rank and its error.
        """
        started, stages = time.perf_counter(), dict[str, float]()
        thorough = not self._verified if verify is None else verify
        digests = self._agreement.agree("prepare", lambda: self._prepare(version, thorough))
        stages["prepare"] = time.perf_counter() - started
        asked: list[UpdatableEngine] = []
        try:
            made = self._agreement.agree(
                "alias", lambda: self._alias(version, digests[self._agreement.rank], asked)
            )
        except BaseException as error:
            abort_all(asked, error)
            raise
        seconds = time.perf_counter() - started
        stages["alias"] = seconds - stages["prepare"]
        self._version, self._verified = version, self._verified or thorough
        receipts = chain.from_iterable(made)
        return SyncReceipt(
            version=version,
            digests=tuple(each for each, _ in product(digests, self._targets) if each is not None),
            nbytes=0,
            link_bytes=0,
            seconds=seconds,
            copy_seconds=0.0,
            verify_seconds=max(
                (each.seconds for each in receipts if each.digest is not None), default=0.0
            ),
            stages=stages,
        )

    def _prepare(self, version: int, thorough: bool) -> int | None:
        """The digest of this rank's parameters, if it is wanted. Their last writes have ended."""
        if self._version is not None and version < self._version:
            text = f"version {version} is stale: version {self._version} has been shared"
            raise ValueError(f"{text}; use a higher one")
        sources = dict(self._sources())
        self._buffers = buffer_values(sources, self._names)
        sources = {name: each for name, each in sources.items() if name not in self._names}
        if (now := places(sources)) != self._of:
            self._check_places(sources)
            self._of, self._digest, self._verified = now, None, False
        if self._saver.device.type == "cuda":
            torch.cuda.synchronize(self._saver.device)  # another process is to read
        if not thorough:
            return None
        if self._digest is None:
            numbers = {piece.name: piece.index_base for piece in self._layout.slices}
            stored = {name: self._layout.aliases.get(name, name) for name in sources}
            self._digest = digest_table(
                [(each, numbers[stored[name]]) for name, each in sources.items()]
            )
        return self._digest.run()

    def _check_places(self, sources: Mapping[str, Tensor]) -> None:
        for name, wanted in byte_offsets(self._layout, sources).items():
            if not sources[name].is_contiguous():
                text = f"strides {sources[name].stride()} in the trainer"
                raise ValueError(f"{name}: {text}; sync by copies (nothing was changed)")
            if (found := self._saver.offset_of(sources[name])) != wanted:
                raise ValueError(
                    f"{name} lies at byte {found} of tag {self._tag!r}, the layout says {wanted}; "
                    "allocate nothing on the tag before the trainer does"
                )

    def _alias(
        self, version: int, digest: int | None, asked: list[UpdatableEngine]
    ) -> list[CommitReceipt]:
        ticket, receipts = self._saver.share(self._tag), []
        for target in self._targets:
            asked.append(target)  # before: it may have done half of it
            receipts.append(
                target.alias_update(
                    version, ticket, self._layout.layout_hash, digest, self._buffers
                )
            )
        return receipts


def byte_offsets(layout: Manifest, params: Mapping[str, Tensor]) -> dict[str, int]:
    """Tells where the layout has each parameter, by the trainer's name: bytes from the tag's start.

    A ValueError lists what does not agree: names, whole shapes, dtypes, parts instead of wholes.
    Tied parameters are looked up by the name that the layout stores. Tensors may be on any device,
    meta too.
    """
    stored = {layout.aliases.get(name, name): name for name in params}
    count = Counter(piece.name for piece in layout.slices)
    problems = [
        f"{name} is not in the rollout's layout" for name in sorted(stored.keys() - count.keys())
    ]
    problems += [f"{name} is not in the trainer" for name in sorted(count.keys() - stored.keys())]
    if layout.zeros:
        problems.append("the rollout's layout has padding, as of one rank of several")
    offsets = {}
    for piece in layout.slices:
        if (name := stored.get(piece.name)) is None:
            continue
        in_parts = "the rollout has it in parts"
        problem = in_parts if count[piece.name] > 1 else _misfit(piece, params[name])
        if problem is not None:
            problems.append(f"{piece.name}: {problem}")
        offsets[name] = piece.offset
    if problems:
        rule = "the trainer's parameters cannot lie as the rollout's do"
        raise ValueError(f"{rule}: {listed(problems)}; leave layout away, and sync by copies")
    return offsets


def _misfit(piece: ParamSlice, param: Tensor) -> str | None:
    shape = tuple(param.shape)
    if piece.global_shape != shape:
        return f"shape {shape} in the trainer, {piece.global_shape} in the rollout"
    if piece.shape != shape:
        return f"the rollout has a part {piece.shape} of {shape}"
    if piece.strides is not None and piece.strides != row_major(shape):
        return "its elements are not adjacent in the rollout"
    if (dtype := getattr(torch, piece.dtype)) != param.dtype:
        return f"{param.dtype} in the trainer, {dtype} in the rollout"
    return None
