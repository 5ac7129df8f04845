"""A sync that moves nothing: engines on the trainer's device serve the trainer's own pages.

    prepare   newer? the shards where they were?    waits for the step that made the weights,
                                                    perhaps digests them
    adopt     every engine maps the pages           and reads them back, if there is a digest

Between the two the ranks agree, as for a sync by copies (`weight_sync.py`). A stage that fails ends
it everywhere: engines that have adopted the pages give them back and serve nothing. As long as an
engine serves them the trainer cannot park its parameters, and must not change them: the lease is
what tells it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product

import torch
from torch import Tensor

from memsaver import MemorySaver
from memsaver.common.digest import Digest
from rollout.protocols import SyncTarget
from rollout.types import CommitReceipt, Manifest
from trainer_bridge.sync.consensus import Alone, Consensus
from trainer_bridge.sync.layout import parts
from trainer_bridge.sync.weight_sync import SyncReceipt, abort_all


class PageShare:
    """Lends the pages of one tag to engines, version by version.

    All ranks make it, and call `share`, together.
    """

    def __init__(
        self,
        saver: MemorySaver,
        tag: str,
        layout: Manifest,
        sources: Callable[[], Mapping[str, Tensor]],
        targets: Sequence[SyncTarget],
        consensus: Consensus | None = None,
    ) -> None:
        """tag: on which the parameters lie as `layout` says. sources: the parameters, whole, by
        name; the same dictionary until one of them moves. targets: engines on the saver's device,
        which say no to another layout.
        """
        self._saver = saver
        self._tag = tag
        self._layout = layout
        self._sources = sources
        self._targets = tuple(targets)
        self._consensus = consensus or Alone()
        self._of: Mapping[str, Tensor] = {}
        self._digest: Digest | None = None
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
        digests = self._consensus.agree("prepare", lambda: self._prepare(version, thorough))
        stages["prepare"] = time.perf_counter() - started
        asked: list[SyncTarget] = []
        try:
            made = self._consensus.agree(
                "adopt", lambda: self._adopt(version, digests[self._consensus.rank], asked)
            )
        except BaseException as error:
            abort_all(asked, error)
            raise
        seconds = time.perf_counter() - started
        stages["adopt"] = seconds - stages["prepare"]
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
        if (sources := self._sources()) is not self._of:
            self._check_places(sources)
            self._of, self._digest, self._verified = sources, None, False
        if self._saver.device.type == "cuda":
            torch.cuda.synchronize(self._saver.device)  # another process is to read
        if not thorough:
            return None
        if self._digest is None:
            self._digest = Digest(parts(self._layout, sources))
        return self._digest.run()

    def _check_places(self, sources: Mapping[str, Tensor]) -> None:
        offsets = {piece.name: piece.offset for piece in self._layout.slices}
        for name, tensor in sources.items():
            wanted = offsets[self._layout.aliases.get(name, name)]
            if (found := self._saver.offset_of(tensor)) != wanted:
                raise ValueError(
                    f"{name} lies at byte {found} of tag {self._tag!r}, the layout says {wanted}; "
                    "allocate nothing on the tag before the trainer does"
                )

    def _adopt(
        self, version: int, digest: int | None, asked: list[SyncTarget]
    ) -> list[CommitReceipt]:
        ticket, receipts = self._saver.share(self._tag), []
        for target in self._targets:
            asked.append(target)  # before: it may have done half of it
            receipts.append(target.adopt_update(version, ticket, self._layout.layout_hash, digest))
        return receipts
