"""Requests between `submit` and their last output."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from memsaver.ops.hash import splitmix64_int
from rollout.model.decoder import ModelConfig
from rollout.requests import Output, SamplingParams, not_token_ids
from rollout.scheduling.beam import check_vocabulary
from rollout.scheduling.samples import BeamGroup, PromptScores, Sample
from rollout.scheduling.scheduler import Scheduler
from rollout.weights.adapters import ServedAdapter

_log = logging.getLogger("rollout")


class OpenRequests:
    """All requests whose ends are not told yet: checks, numbers and queues them, and tells of them.

    Each token is told once. A request stays open until the caller has its last output.

    A request without a seed gets one from its number and the engine's seed.
    """

    def __init__(
        self, model: ModelConfig, scheduler: Scheduler, *, max_context_len: int, seed: int
    ) -> None:
        self._model, self._scheduler = model, scheduler
        self._max_context_len, self._seed = max_context_len, seed
        self._count = 0  # of all requests so far, which numbers the next
        self._samples: dict[int, list[Sample]] = {}
        self._left: dict[int, int] = {}  # number of samples whose ends are not told
        self._untold: dict[Sample, None] = {}  # samples that stream, and have new tokens

    @property
    def ids(self) -> list[int]:
        """Return the numbers of the requests, in order."""
        return list(self._samples)

    def check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise a ValueError, which calls the prompt `name`, if it can never be answered."""
        ids = _token_ids(name, prompt)
        if not len(ids):
            raise ValueError(f"{name} is empty; it needs at least one token")
        self._check_ids(name, ids)
        for what, tokens in _named(params):
            if tokens:
                self._check_ids(f"{what} of {name}", np.asarray(tokens))
        allowed = {*(params.allowed_token_ids or ())}
        banned = {word[0] for word in params.bad_words if len(word) == 1}
        banned |= self._stop_ids(params) if params.min_tokens else set()
        if allowed and allowed <= banned:
            raise ValueError(
                f"{name}: min_tokens and bad_words exclude all of allowed_token_ids; allow more"
            )
        size = self._model.vocab_size
        if strays := [token for token in params.stop_token_ids or () if not 0 <= token < size]:
            text = "stop_token_ids of %s has token ids outside [0, %d), which never end it: %s"
            _log.warning(text, name, size, strays)
        self._scheduler.check_fits(name, len(prompt), params)
        if len(prompt) + params.max_tokens > self._max_context_len:
            raise ValueError(
                f"{name} needs {len(prompt) + params.max_tokens} positions (prompt {len(prompt)} + "
                f"max_tokens {params.max_tokens}), max_context_len is {self._max_context_len}; "
                f"lower max_tokens or raise max_context_len"
            )
        if params.beam_width > 1:
            check_vocabulary(name, params, len(self._stop_ids(params)), self._model.choices)

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        size = self._model.vocab_size
        if ids.min() < 0 or ids.max() >= size:
            raise ValueError(f"{name} has token ids outside [0, {size}); check the tokenizer")

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stream: bool,
        adapter: ServedAdapter | None = None,
    ) -> list[Sample]:
        """Queue a checked request; return its samples."""
        seed = params.seed
        if seed is None:
            seed = splitmix64_int(splitmix64_int(self._seed) + self._count) >> 1
        ids, stop_ids = list(prompt), self._stop_ids(params)
        scores = None if params.prompt_logprobs is None else PromptScores()
        samples = [
            Sample(
                request=self._count,
                index=i,
                prompt=ids,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                adapter=adapter,
                stream=stream and params.beam_width == 1,
                scores=scores,
            )
            for i in range(max(params.n, params.beam_width))
        ]
        if params.beam_width > 1:
            BeamGroup.of(samples)
        self._count += 1
        self._scheduler.add(samples)
        self.follow(samples)
        return samples

    def follow(self, samples: list[Sample]) -> None:
        """Tell of the samples of a request, which are queued."""
        id, told = samples[0].request, min(len(samples), samples[0].params.n)
        self._samples[id], self._left[id] = samples, told

    def abort(self, ids: Iterable[int]) -> None:
        """End requests with their present answers, which `take` tells; unknown ids are ignored."""
        self._scheduler.abort(chain.from_iterable(self._samples.get(id, ()) for id in ids))

    def drop(self, ids: Iterable[int]) -> None:
        """End requests of which nothing will be told."""
        ids = list(ids)
        try:
            self.abort(ids)
        finally:
            for id in ids:
                self._forget(id)

    def take(self, why: Callable[[Sample], Exception], ends_only: bool = False) -> list[Output]:
        """Return what is new since the last call; with `ends_only`, first tokens and ends.

        A request ends as a whole where one of its samples ends with "error". `why` returns the
        error of a sample that has none.
        """
        told, ended = self._scheduler.take_news()
        if broken := {sample.request for sample in ended if sample.finish_reason == "error"}:
            self.abort(broken)
            ended += self._scheduler.take_news()[1]
        self._untold |= dict.fromkeys(told)
        telling = [sample for sample in self._untold if not (ends_only and sample.told)]
        outputs = [sample.news() for sample in telling if sample.finish_reason is None]
        for sample in telling:
            del self._untold[sample]
        for sample in ended:
            if sample.request in self._samples and sample.index < sample.params.n:
                failed = sample.finish_reason == "error"
                outputs.append(sample.news((sample.error or why(sample)) if failed else None))
                self._left[sample.request] -= 1
                if not self._left[sample.request]:
                    self._forget(sample.request)
        return outputs

    def _forget(self, id: int) -> None:
        self._samples.pop(id, None)
        self._left.pop(id, None)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = () if params.ignore_eos else self._model.stop_token_ids
        both = chain(params.stop_token_ids or (), own)
        return frozenset(token for token in both if 0 <= token < self._model.vocab_size)


def _named(params: SamplingParams) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the token ids that parameters name, and what they are for errors."""
    yield "the forced answer", params.forced
    yield "logit_bias", [*dict(params.logit_bias)]
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "bad_words", list(chain.from_iterable(params.bad_words))


def _token_ids(name: str, prompt: Sequence[int]) -> np.ndarray:
    """Return the prompt as an array of integers, or raise a ValueError that calls it `name`."""
    with contextlib.suppress(ValueError):  # raised for nested sequences of different lengths
        ids = np.asarray(prompt)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)):
            return ids
    raise not_token_ids(name)
