"""Takes requests into an engine: each is checked, then made into samples for the scheduler."""

from collections.abc import Sequence

from memsaver.common.hash import splitmix64_int
from rollout.model.config import ModelConfig
from rollout.serving.beam import check_vocabulary
from rollout.serving.samples import BeamGroup, Sample
from rollout.serving.scheduler import Scheduler
from rollout.types import SamplingParams


def for_each(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    """One for every prompt. ValueError where there are as many neither as one nor as prompts."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(each)} SamplingParams; pass one, or one a prompt"
        )
    return each


class Intake:
    """Numbers requests in the order in which they come; seeds not given follow from that."""

    def __init__(
        self, model: ModelConfig, scheduler: Scheduler, *, max_context_len: int, seed: int
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._max_context_len = max_context_len
        self._seed = seed
        self._requests = 0

    def check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """ValueError for what could never be answered, calling the prompt `name`."""
        if not len(prompt):
            raise ValueError(f"{name} is empty; it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._model.vocab_size:
            raise ValueError(
                f"{name} has token ids outside [0, {self._model.vocab_size}); check the tokenizer"
            )
        self._scheduler.check_fits(name, len(prompt), params)
        if len(prompt) + params.max_tokens > self._max_context_len:
            raise ValueError(
                f"{name} needs {len(prompt) + params.max_tokens} positions (prompt {len(prompt)} + "
                f"max_tokens {params.max_tokens}), max_context_len is {self._max_context_len}; "
                f"lower max_tokens or raise max_context_len"
            )
        if params.beam_width > 1:
            check_vocabulary(name, params, len(self._stop_ids(params)), self._model.vocab_size)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """The request's samples, which wait from here on."""
        seed = params.seed
        if seed is None:
            seed = splitmix64_int(splitmix64_int(self._seed) + self._requests) >> 1
        ids, stop_ids = list(prompt), self._stop_ids(params)
        samples = [
            Sample(
                request=self._requests,
                index=i,
                prompt=ids,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
            )
            for i in range(max(params.n, params.beam_width))
        ]
        if params.beam_width > 1:
            BeamGroup.of(samples)
        self._requests += 1
        self._scheduler.add(samples)
        return samples

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids or ())
        return stop_ids if params.ignore_eos else stop_ids | self._model.stop_token_ids
