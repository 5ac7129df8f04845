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

from kvcache.config import check_counts, check_option

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from memsaver import Ticket

FinishReason = Literal["stop", "length", "abort"]

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
        whole = all(_is_number(token, Integral) for token in self.stop_token_ids or ())
        check_option(self, "stop_token_ids", whole, "must be token ids")
        check_counts(self, "max_tokens", "n", "beam_width")
        check_counts(self, "top_k", *([] if self.seed is None else ["seed"]), least=0)
        for name in ("temperature", "top_p", "length_penalty"):
            check_option(self, name, _is_number(getattr(self, name), Real), "must be a number")
        warm = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        rule = f"must be 0 (greedy), or finite and at least {COLDEST:g}"
        check_option(self, "temperature", warm, rule)
        check_option(self, "top_k", self.top_k < 2**31, "must be in [0, 2**31) (0 is off)")
        check_option(self, "top_p", 0 < self.top_p <= 1, "must be in (0, 1] (1 is off)")
        check_option(self, "seed", (self.seed or 0) < 2**63, "must be in [0, 2**63), or None")
        self._check_beams()

    def _check_beams(self) -> None:
        check_option(self, "length_penalty", abs(self.length_penalty) < math.inf, "must be finite")
        rule = 'must be True, False or "never"'
        check_option(self, "early_stopping", self.early_stopping in (True, False, "never"), rule)
        if self.beam_width == 1:
            rule = "is for beam search; set beam_width above 1"
            check_option(self, "length_penalty", self.length_penalty == 1, rule)
            check_option(self, "early_stopping", not self.early_stopping, rule)
            return
        rule = f"answers of a beam search of {self.beam_width}; raise beam_width or lower n"
        check_option(self, "n", self.n <= self.beam_width, rule)
        plain = self.temperature in (0, 1) and not self.top_k and self.top_p == 1
        rule = (
            "ranks by the model's own log-probabilities and samples nothing; leave temperature at "
            "0 or 1, top_k at 0 and top_p at 1"
        )
        check_option(self, "beam_width", plain, rule)


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
        assert len(self.shape) == len(self.global_shape) == len(self.start), self
        assert self.strides is None or len(self.strides) == len(self.shape), self
        ends = (first + size for first, size in zip(self.start, self.shape, strict=True))
        assert all(end <= whole for end, whole in zip(ends, self.global_shape, strict=True)), self


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
        places = {(piece.name, piece.start) for piece in self.slices}
        assert len(places) == len(self.slices), "a part of a parameter appears twice"

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
