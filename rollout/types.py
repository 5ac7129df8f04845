"""Plain data that crosses the engine's boundary: requests, answers, weight-update messages; the
names of its tags, and its errors that are not a user's mistake (those are ValueError).
"""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from memsaver import Ticket

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS = ("stop", "length", "abort")

COLDEST = 1e-6
"""Below, logits divided by the temperature may pass the range of fp32; the draw is greedy long
before.
"""


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Says how to continue one prompt.

    max_tokens: most tokens generated. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
    n: samples a prompt.
    seed: the same (seed, sample index, position) draws the same number in any batch; None takes one
    from the engine.
    stop_token_ids: end a sample, besides the model's own end tokens. ignore_eos: only
    stop_token_ids end it.
    beam_width: above 1, beam search: so many branches, of whose answers the best n are returned;
    nothing is sampled.
    length_penalty: answers of a search are ranked by sum of logprobs / length ** length_penalty.
    early_stopping: True: a search is over with beam_width answers; False: when the best branch, at
    its present length, is not better than the worst of them; "never": the same at the length it
    could reach (transformers' rules).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_tokens", "top_k", "n", "seed", "beam_width"):
            value = getattr(self, name)
            if not _is_number(value, Integral) and (value is not None or name != "seed"):
                raise ValueError(f"{name}={value!r} must be whole")
        if not all(_is_number(token, Integral) for token in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} must be token ids")
        for name in ("temperature", "top_p", "length_penalty"):
            if not _is_number(value := getattr(self, name), Real):
                raise ValueError(f"{name}={value!r} must be a number")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.temperature != 0 and not COLDEST <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy), or finite and at "
                f"least {COLDEST:g}"
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k} must be in [0, 2**31) (0 is off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1] (1 is off)")
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be in [0, 2**63), or None")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beam_width < 1:
            raise ValueError(f"beam_width={self.beam_width} must be at least 1 (1 is off)")
        if not abs(self.length_penalty) < float("inf"):
            raise ValueError(f"length_penalty={self.length_penalty} must be finite")
        if self.early_stopping not in (True, False, "never"):
            rule = 'must be True, False or "never"'
            raise ValueError(f"early_stopping={self.early_stopping!r} {rule}")
        if self.beam_width == 1:
            if self.length_penalty != 1 or self.early_stopping:
                raise ValueError(
                    "length_penalty and early_stopping are for beam search; set beam_width above 1"
                )
            return
        if self.n > self.beam_width:
            text = f"n={self.n} answers of a beam search of {self.beam_width}"
            raise ValueError(f"{text}; raise beam_width or lower n")
        if self.temperature not in (0, 1) or self.top_k or self.top_p < 1:
            raise ValueError(
                f"beam search ranks by the model's own log-probabilities and samples nothing; with "
                f"beam_width={self.beam_width} leave temperature at 0 or 1, top_k at 0 and top_p "
                f"at 1"
            )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample. The three lists have one entry a generated token; the end token is included.

    logprobs: log_softmax(logits / temperature)[token] in fp32, before top-k and top-p (temperature
    1 when greedy).
    weight_versions: the version of the weights that made the token. score: of beam search, what it
    ranks by. routed_experts: with `EngineConfig.return_routed_experts`, and no beam search, uint8
    or int16 [K, layers with experts, top_k]: which experts the K tokens before the last went to;
    what the prefix cache had of the prompt, or another engine computed, is not among them.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int]
    score: float | None = None
    routed_experts: "NDArray[Any] | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs) == len(self.weight_versions)
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"finish_reason={self.finish_reason!r} must be one of {', '.join(FINISH_REASONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """One checkpoint parameter, or a box of it that this rank holds, in the store.

    offset: bytes from the start of the tag's arena. dtype: like "float32". start: of this part in
    the whole parameter, one entry a dimension. index_base: number of the whole parameter's first
    element in the digest. strides: in elements, where the part is not one range of bytes (gate rows
    of every expert of a fused tensor).
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    index_base: int
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.strides is not None and (
            len(self.strides) != len(self.shape) or min(self.strides, default=1) < 1
        ):
            rule = f"must be positive, one for each of {self.shape}"
            raise ValueError(f"{self.name}: strides {self.strides} {rule}")
        if not len(self.shape) == len(self.global_shape) == len(self.start):
            rule = "must have as many dimensions"
            raise ValueError(f"{self.name}: shape, global_shape and start {rule}")
        for size, whole, first in zip(self.shape, self.global_shape, self.start, strict=True):
            if first < 0 or first + size > whole:
                text = f"slice {self.shape} at {self.start} is outside {self.global_shape}"
                raise ValueError(f"{self.name}: {text}")
        if self.offset < 0 or self.index_base < 0:
            raise ValueError(f"{self.name}: offset and index_base must not be negative")


@dataclass(frozen=True, kw_only=True)
class ModuleTensor:
    """A fused tensor that the model multiplies with: adjacent slices seen as one. offset in bytes,
    as in ParamSlice.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Says where every parameter lies under tag `weights`.

    nbytes: end of the last slice, from the start of the tag's arena. aliases: tied name -> stored
    name.
    modules: fused tensor name -> where. layout_hash: changes with any of it. zeros: (offset, bytes)
    of padding that the model reads and no parameter fills.
    """

    nbytes: int
    slices: tuple[ParamSlice, ...]
    aliases: dict[str, str]
    modules: dict[str, ModuleTensor]
    layout_hash: str
    zeros: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        names = {piece.name for piece in self.slices}
        if len({(piece.name, piece.start) for piece in self.slices}) != len(self.slices):
            raise ValueError("a parameter, or the same part of it, appears twice in the manifest")
        for alias, target in self.aliases.items():
            # the target may be a module: all of it is padding here
            if alias in names or target not in names | self.modules.keys():
                rule = "must go from a name that is not stored to one that is"
                raise ValueError(f"alias {alias} -> {target} {rule}")

    def __reduce__(self) -> tuple[Callable[[bytes], "Manifest"], tuple[bytes]]:
        """One string of bytes, made once: hundreds of slices in each message of an update cost
        milliseconds.
        """
        if (packed := self.__dict__.get("_packed")) is None:
            packed = pickle.dumps({field.name: getattr(self, field.name) for field in fields(self)})
            object.__setattr__(self, "_packed", packed)
        return _unpack_manifest, (packed,)


@lru_cache(maxsize=4)
def _unpack_manifest(packed: bytes) -> Manifest:
    return Manifest(**pickle.loads(packed))


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """Says what lies where, for who plans to write it.

    place: the device of the pages (`memsaver.system.machine.place_of`). buffers: names and shapes
    of what the model computes with beside its parameters: values arrive with a write's receipt.
    """

    manifest: Manifest
    place: str
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WeightOffer:
    """The engine's invitation to write `version` into the pages of `ticket`, where the manifest
    says.

    shadow: they are pages of their own, beside those that are served; otherwise the weights are
    undefined from here on.
    names: only these parameters will be written; None: all.
    """

    version: int
    manifest: Manifest
    ticket: "Ticket"
    shadow: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PackedBox:
    """A box of elements of the weights, row-major from byte `at` of a message.

    offset: of its first element, in bytes from the start of the tag's arena; strides: of the others
    there, in elements of `itemsize` bytes.
    """

    at: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        if self.itemsize not in (1, 2, 4) or len(self.shape) != len(self.strides):
            raise ValueError(
                f"a box has elements of 1, 2 or 4 bytes and as many strides as sizes, got {self}"
            )
        if min(self.at, self.offset, *self.shape, *self.strides) < 0:
            raise ValueError(f"a box has no negative numbers, got {self}")
        if self.at % self.itemsize or self.offset % self.itemsize:
            rule = f"must be multiples of the {self.itemsize} bytes of an element"
            raise ValueError(f"at and offset {rule}, got {self}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def end(self) -> int:
        """First byte of the arena after it."""
        span = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1
        return self.offset + (span * self.itemsize if self.nbytes else 0)


@dataclass(frozen=True, kw_only=True)
class WriteReceipt:
    """Holds what the writers say they wrote. digest: memsaver.ops.digest over every slice.
    nbytes: parameters, no padding. Both are over the offer's `names` only, where it has some.
    buffers: values of the layout's buffers, fp32 on the CPU; those left out stay as they are.
    """

    version: int
    layout_hash: str
    digest: int
    nbytes: int
    buffers: "dict[str, Tensor]" = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.digest < 2**64:
            raise ValueError(f"digest={self.digest} must be in [0, 2**64)")


@dataclass(frozen=True, kw_only=True)
class VerifyReceipt:
    """Holds what the engine read back, equal to what the writer says, and will serve when it is
    committed.
    """

    version: int
    digest: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CommitReceipt:
    """Says what the engine now serves; the digest is that of the verification, None for pages
    aliased without one.
    """

    version: int
    digest: int | None
    seconds: float


WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
WEIGHTS_SHADOW = "weights_shadow"  # of an update only: has memory while one is under way
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)


class RankError(RuntimeError):
    """The other tensor-parallel ranks did not come to an exchange; the text names them, and the
    stage.
    """


class PeerLostError(RuntimeError):
    """A rank of the engine at the other end of a prefill/decode split is gone or silent; the text
    names it.
    """


class WeightUpdateError(RuntimeError):
    """A weight update failed, or was called out of order; `unavailable_reason()` says whether the
    engine can serve.
    """
