"""Operations on fake tensors, and what they would ask of torch's allocator.

`PlannedDevice` follows a process's storages, `PlannedSaver` stands in for its `MemorySaver`,
`PlannedRollout`, of which there are only sizes, for the engine;
attention is as a GPU computes it: which tensors it keeps is what counts.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memsaver import Usage
from memsaver.ops.layout import round_up
from recipes.planner.allocator import CachingAllocator, Key, Log
from rollout import Completion, SamplingParams
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, WEIGHTS
from trainer_bridge.training import packed_attention

PAGE = 2 << 20
_MULTIPLIES = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class PlannedDevice(TorchDispatchMode):
    """Logs every storage that operations make, resize or drop inside `following()`."""

    def __init__(self, workspace_bytes: int) -> None:
        """workspace_bytes: of cuBLAS, one for each thread that multiplies."""
        super().__init__()
        self.log = Log()
        self.emptied = 0  # how often torch's cache was
        self.host_bytes = 0  # of the host, for good
        # That what is made now belongs to; None: torch's own.
        self._tag: CachingAllocator | None = None
        self._workspace = workspace_bytes
        self._workspaces: dict[str, Key] = {}
        self._keys: dict[int, tuple[Key | None, weakref.ref[Any]]] = {}
        self._held: set[Key] = set()
        self._views: dict[int, weakref.ref[Any]] = {}
        self._streams: dict[int, int] = {}

    def empty_cache(self) -> None:
        for key in self._workspaces.values():
            self._free(key)
        self._workspaces.clear()
        self.emptied += 1
        self.log.add("empty_cache")

    def read(self) -> None:
        self.log.add("read")

    @contextlib.contextmanager
    def placing(self, tag: CachingAllocator) -> Iterator[None]:
        before, self._tag = self._tag, tag
        try:
            yield
        finally:
            self._tag = before

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """FSDP frees and takes unsharded parameters by resizing storages.

        That is no operation, so no dispatch mode sees it, and FSDP calls no hook of ours there:
        torch's own method is replaced inside the block.
        """
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage, size)
            return out

        torch.UntypedStorage.resize_ = followed  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def mark_layers(self, model: Any) -> None:
        """Cut the log where the layers of a transformers decoder begin and end."""
        decoder = model.get_decoder()
        for index, layer in enumerate(decoder.layers):
            layer.register_forward_pre_hook(self._before(index), prepend=True)
            layer.register_forward_hook(self._after(index))
        decoder.norm.register_forward_pre_hook(
            lambda *_: None if _in_backward() else self.log.leave(), prepend=True
        )

    def _before(self, index: int) -> Any:
        def entered(layer: nn.Module, args: Any) -> None:
            if _in_backward():
                return  # a checkpointed layer, computed anew
            self.log.enter("forward", index)
            if index == 0 and args[0].requires_grad:
                args[0].register_hook(lambda grad: self.log.leave())

        return entered

    def _after(self, index: int) -> Any:
        def left(layer: nn.Module, args: Any, out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad and not _in_backward():
                hidden.register_hook(lambda grad: self._backward(index))

        return left

    def _backward(self, index: int) -> None:
        self.log.enter("backward", index)
        if index == 0:
            torch.autograd.Variable._execution_engine.queue_callback(self.log.leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # a number that steers nothing here
        if func.overloadpacket.__name__ in _MULTIPLIES:
            self._take_workspace()
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Of tensors without memory torch has the shapes of bf16 alone.
            out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:]).to(args[0].dtype)
        else:
            out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            batch, heads, length, _ = args[1].shape
            self._pass_by(_flash_scratch(args[1], args[2], heads, batch * round_up(length, 128)))
        if func is torch.ops.aten._flash_attention_backward.default:
            sequences = len(args[6]) - 1
            total, heads, _ = args[1].shape
            self._pass_by(_flash_scratch(args[1], args[2], heads, total + 128 * sequences))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                if func.is_view:
                    self._see_view(leaf.untyped_storage(), args[0].untyped_storage())
                else:
                    self._see(leaf.untyped_storage())
        return out

    def _see_view(self, view: torch.UntypedStorage, base: torch.UntypedStorage) -> None:
        """Takes nothing for a fake view's own storage, and keeps the base alive."""
        address = view._cdata
        if address not in self._keys and address not in self._views:

            def gone(_: Any, base: torch.UntypedStorage = base) -> None:
                del self._views[address]

            self._views[address] = weakref.ref(view, gone)

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._keys or address in self._views:
            return
        key = None
        if self._tag is None:
            key = self.log.new_key()
            self._allocate(key, storage.nbytes())
        elif storage.nbytes():
            self._tag.allocate(object(), storage.nbytes())

        def gone(dead: Any) -> None:
            if address in self._keys and self._keys[address][1] is dead:
                del self._keys[address]
            self._free(key)

        self._keys[address] = (key, weakref.ref(storage, gone))

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._see(storage)
        if (entry := self._keys.get(storage._cdata)) is None or entry[0] is None:
            return
        self._free(entry[0])
        if nbytes:
            self._keys.pop(storage._cdata)  # under a new key, made by this block
            self._see(storage)

    def _allocate(self, key: Key, nbytes: int) -> None:
        if nbytes:
            self._held.add(key)
            self.log.add("allocate", key, nbytes, self._stream())

    def _free(self, key: Key | None) -> None:
        if key in self._held:
            self._held.remove(key)
            self.log.add("free", key)

    def _take_workspace(self) -> None:
        name = "backward" if _in_backward() else "forward"  # autograd has a thread of its own
        if self._workspace and name not in self._workspaces:
            self._workspaces[name] = key = self.log.new_key()
            self._allocate(key, self._workspace)

    def _pass_by(self, sizes: list[int]) -> None:
        keys = [self.log.new_key() for _ in sizes]
        for key, size in zip(keys, sizes, strict=True):
            self._allocate(key, size)
        for key in keys:
            self._free(key)

    def _stream(self) -> int:
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _flash_scratch(query: Tensor, key: Tensor, heads: int, rows: int) -> list[int]:
    """Returns bytes in FlashAttention's backward: fp32 dQ, row sums, dK and dV a query head."""
    sizes = [4 * rows * heads * round_up(query.shape[-1], 32), 4 * heads * rows]
    if key.numel() != query.numel():
        sizes += 2 * [query.numel() * query.element_size()]
    return sizes


class PlannedSaver:
    """Offers what a trainer asks of a `MemorySaver`. Tags have sizes and states, and no memory."""

    device = torch.device("cpu")

    def __init__(self, device: PlannedDevice) -> None:
        self.planned = device
        self._direct = Counter[str]()
        self._regions = defaultdict[str, CachingAllocator](CachingAllocator)
        self.paused: set[str] = set()

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, tag: str, content: str = "discard"
    ) -> Tensor:
        with self.planned.placing(CachingAllocator()):
            tensor = torch.empty(shape, dtype=dtype)
        self._direct[tag] += tensor.numel() * dtype.itemsize
        return tensor

    @contextlib.contextmanager
    def region(self, tag: str, content: str | None = None) -> Iterator[None]:
        with self.planned.placing(self._regions[tag]):
            yield

    def pause(self, *tags: str, content: str, release: str) -> None:
        self.paused |= set(tags)

    def resume(self, *tags: str) -> None:
        self.paused -= set(tags)

    @property
    def backend(self) -> Self:
        return self

    def bind_thread(self) -> None:
        """Do nothing: no thread works on this device."""

    def is_paused(self, tag: str) -> bool:
        return tag in self.paused

    def discards(self, tag: str) -> int:
        return 0

    def unbacked_bytes(self, tag: str) -> int:
        return 0

    def mark_clean(self, tag: str, version: object) -> None:
        """Content is nothing here."""

    def leases(self, tag: str) -> int:
        return 0

    def sizes(self) -> dict[str, int]:
        """Bytes of every tag while it has memory, not yet rounded to pages."""
        tags = dict.fromkeys([*self._direct, *self._regions])
        return {tag: self._direct[tag] + self._regions[tag].reserved for tag in tags}


ATTENTION = "planned"
PACKED_ATTENTION = "planned_packed"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query: [B, H, L, D]; returns [B, L, H, D]. FlashAttention where torch has it, the plain
    formula elsewhere.

    For heads whose values are narrower than their keys (latent attention), what flash keeps of them
    padded.
    """
    if query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        width = value.shape[-1]
        if width != query.shape[-1]:
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, scale=scaling
        )[0]
        out = out[..., :width]
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
    return out.transpose(1, 2).contiguous(), None


def planned_packed_attention(*args: Any, **how: Any) -> tuple[Tensor, None]:
    """Does what the trainer's `packed_attention` does on a GPU."""
    with sdpa_kernel(SDPBackend.MATH):
        return packed_attention(*args, flash=True, **how)


def register_attention() -> None:
    """Make `attention` known to transformers as `ATTENTION`, `planned_packed_attention` as
    `PACKED_ATTENTION`. Models that ask for one make no masks.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, planned_packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


HandedOver = tuple[tuple[str, ...], str]
"""Tags of one side that leave, and the tag of the other that takes their memory."""
PIECE = 1 << 30  # bytes that an elastic tag takes and gives at a time


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """One rank's. grows: whether the pool may begin small; least, wanted: what it wakes with then,
    and what requests use at once. idle: what torch holds while nothing is computed; generating: the
    most of it in a step.
    """

    weights: int
    kv_cache: int
    least: int
    wanted: int
    grows: bool
    cuda_graph: int
    idle: int
    generating: int

    @property
    def tags(self) -> dict[str, int]:
        return {WEIGHTS: self.weights, KV_CACHE: self.kv_cache, CUDA_GRAPH: self.cuda_graph}


class PlannedRollout:
    """Sleeps, wakes up, and answers with as many tokens as it may (`Rollout`)."""

    weights_version = 0

    def __init__(self, sizes: EngineSizes, staged: bool = True) -> None:
        """staged: False wakes all tags up with the first."""
        self._sizes, self._staged = sizes, staged
        self._asleep = set(sizes.tags)
        self._pool = self._grown = sizes.kv_cache  # bytes while it is awake, and with answers
        self._resident = 0
        self.answered: Callable[[], None] = lambda: None  # what is over then
        self.handed_over: set[HandedOver] = set()  # by both sides
        self._torch = self._peak = sizes.idle

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, on_progress: Any = None
    ) -> list[list[Completion]]:
        self._pool = self._grown
        self.answered()
        # Which torch keeps, until the KV cache sleeps.
        self._torch = self._peak = self._sizes.generating
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return [[_longest(param.max_tokens)] * param.n for param in each]

    def sleep(
        self,
        level: int = 1,
        unfinished: str = "raise",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None:
        chosen = set(self._sizes.tags if tags is None else tags)
        self._resident = self._sizes.weights if level == 1 and WEIGHTS in chosen else 0
        self._asleep |= chosen
        if into is not None:
            self.handed_over.add((tuple(sorted(chosen)), into))
        if KV_CACHE in chosen:
            self._torch = self._sizes.idle

    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        self._asleep -= set(self._sizes.tags if tags is None or not self._staged else tags)
        whole = self._sizes.kv_cache
        self._pool = min(whole, self._sizes.least) if partly else whole
        self._grown = min(whole, self._sizes.wanted) if partly else whole

    def prepare_sleep(self) -> None:
        """Host memory of the sleeps themselves."""

    def shrink(self) -> None:
        """Only ever makes room earlier."""

    def take_usage(self) -> Usage:
        peak, self._peak = self._peak, self._torch
        tags = self._sizes.tags | {KV_CACHE: self._pool}
        return planned_usage(tags, self._asleep, self._torch, peak, self._resident)

    def abort_update(self, reason: str) -> None:
        raise AssertionError(reason)


def planned_usage(
    sizes: Mapping[str, int], away: Set[str], torch_bytes: int, torch_peak: int, host: int = 0
) -> Usage:
    """A process has all tags but those that are away, and torch's own."""
    return Usage(
        tags={tag: 0 if tag in away else nbytes for tag, nbytes in sizes.items()},
        torch_bytes=torch_bytes,
        torch_peak_bytes=torch_peak,
        device_used_bytes=None,
        host_bytes=host,
    )


def _longest(tokens: int) -> Completion:
    return Completion(
        token_ids=[0] * tokens,
        logprobs=[0.0] * tokens,
        finish_reason="length",
        weight_versions=[0] * tokens,
    )
