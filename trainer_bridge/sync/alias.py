"""A sync that moves nothing: engines on the trainer's device serve the trainer's own pages.

    prepare   newer?                                waits for the step that made the weights,
                                                    digests them the first time
    alias     every engine maps the pages           and reads them back, if there is a digest

Between the two the ranks agree, as for a sync by copies (`weight_sync.py`). A stage that fails ends
it everywhere: engines that have aliased the pages give them back and serve nothing. As long as an
engine serves them the trainer cannot offload its parameters, and must not change them: the lease is
what tells it.
"""

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
    """The pages of one tag that a sync's engines serve, version by version; all ranks call it
    together.
    """

    def __init__(self, saver: MemorySaver, tag: str, layout: Manifest, sync: WeightSync) -> None:
        """tag: on which the parameters lie as `layout` says. sync: by copies, of whole parameters
        with engines on the saver's device, which say no to another layout; its buffers are copied
        here, too, as they lie in no page.
        """
        self._saver, self._tag, self._layout, self._sync = saver, tag, layout, sync
        self._buffers: dict[str, Tensor] = {}
        self._version: int | None = None

    def share(self, version: int) -> SyncReceipt:
        """Have every target serve the parameters as they are now, as `version`, in these very
        pages.

        The first time they are digested here, and read back by every engine through its own
        addresses. From then on the layouts' hashes are all that is compared: nothing is written, so
        nothing can be written wrongly. The receipt has nbytes 0, and digests and verify_seconds
        (mapping included) only where they were read. Raises what went wrong here, or a `SyncError`
        that names the stage, the rank and its error.
        """
        started, stages = time.perf_counter(), dict[str, float]()
        prepared = self._sync.agreement.agree("prepare", lambda: self._prepare(version))
        stages["prepare"] = time.perf_counter() - started
        digests = [each for each in prepared if each is not None]
        asked: list[UpdatableEngine] = []
        try:
            made = self._sync.agreement.agree(
                "alias", lambda: self._alias(version, prepared[self._sync.agreement.rank], asked)
            )
        except BaseException as error:
            abort_all(asked, error)
            raise
        seconds = time.perf_counter() - started
        stages["alias"] = seconds - stages["prepare"]
        self._version = version
        slowest = max((each.seconds for each in chain.from_iterable(made)), default=0.0)
        return SyncReceipt(
            version=version,
            digests=tuple(each for each, _ in product(digests, self._sync.targets)),
            seconds=seconds,
            verify_seconds=slowest if digests else 0.0,
            stages=stages,
        )

    def _prepare(self, version: int) -> int | None:
        """Return the digest of this rank's parameters, where they are to be read back. Their last
        writes have ended.
        """
        if self._version is not None and version < self._version:
            text = f"version {version} is stale: version {self._version} has been shared"
            raise ValueError(f"{text}; use a higher one")
        sources = self._sync.sources()
        self._buffers = buffer_values(sources, self._sync.buffers)
        if self._saver.device.type == "cuda":
            torch.cuda.synchronize(self._saver.device)  # another process is to read
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
    shards = [shard_of(name, param, 0) for name, param in params.items()]
    plan = make_plan(shards, [""], [WeightLayout(manifest=layout, place="")])
    misfits = ((name, _misfit(piece, params[name])) for name, piece, *_ in plan.slices)
    problems = [f"{name}: {problem}" for name, problem in misfits if problem is not None]
    if layout.zeros:
        problems.append("the rollout's layout has padding, as of one rank of several")
    if problems:
        rule = "the trainer's parameters cannot lie as the rollout's do"
        raise ValueError(f"{rule}: {listed(problems)}; leave layout away, and sync by copies")
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
