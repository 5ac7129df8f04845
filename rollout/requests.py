"""Define what a request asks for, and its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from kvcache.config import check_counts, check_option

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    routed_experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs) == len(self.weight_versions)
