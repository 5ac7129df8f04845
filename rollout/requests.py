"""Sampling parameters of a request, and the completions that answer it."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.config import check_counts, check_option

Progress = Callable[[int, int, int], None]
"""Callback after every step: (finished samples, all samples, generated tokens).

A beam search counts when it has ended.
"""
FinishReason = Literal["stop", "length", "abort", "error"]
TokenScores = list[tuple[int, float]]
"""Tokens with their log-probabilities."""
COLDEST = 1e-6
"""Lowest temperature above 0. Below it, logits / temperature could overflow fp32.

Sampling is greedy in effect long before.
"""


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
        max_tokens: Maximum number of generated tokens per sample.
        temperature: Divides the logits; 0 is greedy.
        top_k: Sample among the k likeliest tokens; 0 is off.
        top_p: Sample among the likeliest tokens with this total probability, in (0, 1]; 1 is off.
        n: Samples per prompt.
        seed: Makes sampling reproducible: the same (seed, sample index, position) draws the same
            number in any batch. None takes a seed from the engine.
        stop_token_ids: Token ids that end a sample, in addition to the model's end tokens.
        ignore_eos: Only `stop_token_ids` end a sample.
        forced: The first tokens of each answer, which are not drawn. Each still gets its
            log-probability, and an end token among them ends the sample.
        beam_width: Above 1, beam search with this number of branches. The best `n` answers are
            returned, and nothing is sampled.
        length_penalty: Beam search ranks answers by sum of log-probs / length ** length_penalty.
        early_stopping: When a beam search ends (the rules of transformers). True: once there are
            `beam_width` answers. False: once the best branch, at its present length, does not rank
            above the worst answer. "never": the same, at the greatest length the branch can reach.
        min_p: Sample among the tokens with at least this share of the likeliest one's probability,
            in [0, 1]; 0 is off.
        min_tokens: No end token comes before this number of tokens.
        presence_penalty: Subtracted from the logits of tokens that the answer has.
        frequency_penalty: Subtracted as often as the answer has them.
        repetition_penalty: Divides positive logits of tokens that prompt or answer has, and
            multiplies negative ones; 1 is off.
        logit_bias: Added to the logits of tokens, {token id: bias}; kept as pairs.
        allowed_token_ids: Only these tokens are chosen; None: all.
        bad_words: Sequences of token ids that no answer contains.
        json_schema: JSON schema that the text of each answer follows, as text or as a mapping; kept
            as text. An answer that `max_tokens` cuts off is the beginning of such a text.
        top_logprobs: Number of likeliest tokens to tell at each place of an answer, with their
            log-probabilities.
        prompt_logprobs: Tell the log-probability of each token of the prompt, and so many likeliest
            tokens at each place; such a prompt takes nothing from the prefix cache. None: not.
        adapter: Name of the adapter that answers, in its present version; None: the base alone.
        priority: Requests of lower numbers leave the queue first, equal ones in their order.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    forced: tuple[int, ...] = ()
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    json_schema: str | Mapping[str, Any] | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    adapter: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if isinstance(value, np.generic):  # other ranks get the numbers as text
                object.__setattr__(self, name, value.item())
        if self.stop_token_ids is not None:
            self._keep_as_tuple("stop_token_ids")
        self._keep_as_tuple("forced")
        named = self.adapter is None or isinstance(self.adapter, str)
        check_option(self, "adapter", named, "must be the name of an adapter, or None")
        check_option(self, "priority", _is_number(self.priority, Integral), "must be an integer")
        check_counts(self, "max_tokens", "n", "beam_width")
        given = [name for name in ("seed", "prompt_logprobs") if getattr(self, name) is not None]
        check_counts(self, "top_k", "top_logprobs", *given, least=0)
        for name in ("temperature", "top_p", "length_penalty"):
            check_option(self, name, _is_number(getattr(self, name), Real), "must be a number")
        warm = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        rule = f"must be 0 (greedy), or finite and at least {COLDEST:g}"
        check_option(self, "temperature", warm, rule)
        check_option(self, "top_k", self.top_k < 2**31, "must be in [0, 2**31) (0 is off)")
        check_option(self, "top_p", 0 < self.top_p <= 1, "must be in (0, 1] (1 is off)")
        check_option(self, "seed", (self.seed or 0) < 2**63, "must be in [0, 2**63), or None")
        rule = f"are {len(self.forced)} tokens, more than max_tokens={self.max_tokens}; raise it"
        check_option(self, "forced", len(self.forced) <= self.max_tokens, rule)
        self._check_adjustments()
        self._check_beams()

    @property
    def penalized(self) -> bool:
        """Return whether logits depend on the tokens of prompt or answer."""
        repeated = self.repetition_penalty != 1
        return bool(repeated or self.presence_penalty or self.frequency_penalty)

    @property
    def adjusted(self) -> bool:
        """Return whether tokens are chosen by other logits than the model's."""
        listed = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        guided = self.json_schema is not None
        return self.penalized or guided or bool(listed or self.min_tokens)

    def _keep_as_tuple(self, name: str) -> None:
        ids = _token_ids(getattr(self, name))
        check_option(self, name, ids is not None, "must be a sequence of token ids, such as (5,)")
        object.__setattr__(self, name, ids)

    def _check_adjustments(self) -> None:
        check_counts(self, "min_tokens", least=0)
        rule = f"is more than max_tokens={self.max_tokens}; lower it"
        check_option(self, "min_tokens", self.min_tokens <= self.max_tokens, rule)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"):
            value = getattr(self, name)
            finite = _is_number(value, Real) and math.isfinite(value)
            check_option(self, name, finite, "must be a finite number")
        check_option(self, "repetition_penalty", self.repetition_penalty > 0, "must be positive")
        check_option(self, "min_p", 0 <= self.min_p <= 1, "must be in [0, 1] (0 is off)")
        if self.allowed_token_ids is not None:
            self._keep_as_tuple("allowed_token_ids")
            check_option(self, "allowed_token_ids", self.allowed_token_ids != (), "allows no token")
        words = self.bad_words if isinstance(self.bad_words, Iterable) else [None]
        known = tuple(_token_ids(word) for word in words)
        check_option(
            self, "bad_words", all(map(bool, known)), "must be sequences of token ids, as ((5, 6),)"
        )
        object.__setattr__(self, "bad_words", known)
        self._keep_as_pairs()
        self._check_schema()

    def _check_schema(self) -> None:
        if self.json_schema is None:
            return
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        rule = "must be a JSON schema, as text or as a mapping"
        check_option(self, "json_schema", isinstance(self.json_schema, str), rule)
        others = self.forced or self.allowed_token_ids is not None or self.bad_words
        free = not (others or self.min_tokens or self.ignore_eos)
        rule = "decides which tokens come, and the end; leave out forced, allowed_token_ids, "
        check_option(self, "json_schema", free, f"{rule}bad_words, min_tokens and ignore_eos")

    def _keep_as_pairs(self) -> None:
        given: Any = self.logit_bias
        rule = "must be finite numbers by token id, such as {5: 1.5}"
        try:
            pairs = dict(given).items()
        except (TypeError, ValueError):
            pairs = {"": 0.0}.items()
        whole = all(_is_number(token, Integral) for token, _ in pairs)
        finite = all(_is_number(bias, Real) and math.isfinite(bias) for _, bias in pairs)
        check_option(self, "logit_bias", whole and finite, rule)
        kept = tuple((int(token), float(bias)) for token, bias in pairs)
        object.__setattr__(self, "logit_bias", kept)

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
        told = self.top_logprobs or self.prompt_logprobs is not None
        plain = plain and not (self.forced or self.min_p or self.adjusted or told)
        rule = (
            "ranks by the model's own log-probabilities and samples nothing; leave temperature at "
            "0 or 1, top_k at 0, top_p at 1, forced empty, and out what adjusts or tells logits"
        )
        check_option(self, "beam_width", plain, rule)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample. Each of its lists has one entry per generated token, including the end token.

    Attributes:
        token_ids: The generated tokens.
        logprobs: log_softmax(logits / temperature)[token] in fp32, before top-k and top-p. Greedy
            sampling counts as temperature 1.
        finish_reason: "stop" after an end token, "length" after `max_tokens`, "abort", or "error".
        weight_versions: The version of the weights, or of the adapter, that generated each token.
        score: The rank value of a beam search's answer; None without beam search.
        top_logprobs: With `SamplingParams.top_logprobs`, the likeliest tokens at each place, best
            first, and their log-probabilities, which are those of `logprobs`.
        prompt_logprobs: With `SamplingParams.prompt_logprobs`, at temperature 1 for each token of
            the prompt but the first: the token itself, then the likeliest ones.
        routed_experts: With `EngineConfig.return_routed_experts` and without beam search, uint8 or
            int16 [K, layers with experts, top_k]: the experts of the last K tokens before the final
            one. Prompt tokens from the prefix cache or from another engine are not included.
        cached_tokens: Leading tokens of the prompt that came from the prefix cache, or from what is
            below it, when the request began. 0: no prefix was known, or a hosted engine is silent.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int]
    score: float | None = None
    top_logprobs: list[TokenScores] = field(default_factory=list)
    prompt_logprobs: list[TokenScores] | None = None
    routed_experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    cached_tokens: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs) == len(self.weight_versions)

    @classmethod
    def joined(cls, outputs: "Sequence[Output]") -> "Completion":
        """Join the outputs of one sample.

        Args:
            outputs: All of them, in order.

        Returns:
            The sample.
        """
        whole = Output.joined(outputs)
        assert whole.finish_reason is not None
        return cls(
            token_ids=whole.token_ids,
            logprobs=whole.logprobs,
            finish_reason=whole.finish_reason,
            weight_versions=whole.weight_versions,
            score=whole.score,
            top_logprobs=[*whole.top_logprobs],
            prompt_logprobs=whole.prompt_logprobs,
            routed_experts=whole.routed_experts,
            cached_tokens=whole.cached_tokens,
        )


class Output(NamedTuple):
    """What `step` tells of one sample: each token is in one output, in order.

    A request that was submitted with `stream=False` has one output for each sample, at its end, as
    has a beam search.

    Attributes:
        id: Number of the request, as `submit` returned it.
        sample: Number of the sample in its request.
        token_ids: Generated tokens since the last output, including the end token.
        logprobs: Their log-probabilities, see `Completion`.
        weight_versions: The version of the weights that generated each of them.
        finish_reason: None until the sample's last output.
        error: Why the request ended with "error"; None otherwise.
        score: See `Completion`.
        top_logprobs: See `Completion`; of the tokens of this output.
        prompt_logprobs: In the last output; see `Completion`.
        routed_experts: In the last output, those of the whole sample; see `Completion`.
        cached_tokens: See `Completion`.
    """

    id: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason | None
    error: Exception | None = None
    score: float | None = None
    top_logprobs: Sequence[TokenScores] = ()
    prompt_logprobs: list[TokenScores] | None = None
    routed_experts: NDArray[Any] | None = None
    cached_tokens: int = 0

    @classmethod
    def joined(cls, outputs: "Sequence[Output]") -> "Output":
        """Join outputs of one sample that follow each other.

        Args:
            outputs: At least one, in order.

        Returns:
            Their tokens, and what the last one says besides.
        """
        return outputs[-1]._replace(
            token_ids=list(chain.from_iterable(output.token_ids for output in outputs)),
            logprobs=list(chain.from_iterable(output.logprobs for output in outputs)),
            weight_versions=list(chain.from_iterable(o.weight_versions for o in outputs)),
            top_logprobs=list(chain.from_iterable(output.top_logprobs for output in outputs)),
        )


def for_each(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    """Return one `SamplingParams` per prompt, repeating it if one is given for all prompts.

    Raises:
        ValueError: The prompts are no sequence of sequences, or the numbers differ.
    """
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Sized):
            raise not_token_ids(f"prompt {i}")
    expanded = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(expanded) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(expanded)} SamplingParams; pass one, or one per "
            f"prompt"
        )
    return expanded


def _token_ids(given: Any) -> tuple[int, ...] | None:
    """Return token ids as a tuple; None if they are not integers."""
    ids = tuple(given) if isinstance(given, Iterable) else (None,)
    return tuple(map(int, ids)) if all(_is_number(id, Integral) for id in ids) else None


def not_token_ids(name: str) -> ValueError:
    """Return the error of a prompt that is no sequence of integers."""
    return ValueError(
        f"{name} must be a sequence of token ids (integers); encode text first, and pass a list of "
        f"such sequences even for one prompt"
    )
