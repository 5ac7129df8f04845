"""A known sequence through an engine: prefill of the prompt, then a decode step for each token.

The engine's own kernels sample. The random number of each draw is chosen to fall on the known
token, so its log-probability comes from the code that computes it in a run.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memsaver.ops.hash import GOLDEN, MASK64, MUL1, MUL2, signed, splitmix64_int
from rollout.engine import Engine
from rollout.ops.token_sampling import SamplingBatch, deliver, sample
from rollout.requests import SamplingParams
from rollout.serving.samples import Sample
from rollout.tap import tap


def teacher_forced(
    engine: Engine, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> list[float]:
    """Run a sequence through an idle engine, and return the response's log-probabilities.

    Listeners of `rollout.tap` get the logits of each response token, too. A token whose probability
    is below the resolution of fp32 sums, 1e-7, may get NaN: it cannot be drawn.
    """
    runner, scores = engine.runner, list[float]()
    params = SamplingParams(max_tokens=len(response), temperature=temperature, ignore_eos=True)

    @torch.inference_mode()
    def forced(
        logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]
    ) -> tuple[list[int], list[float]]:
        (row,), (member,) = rows, samples
        token = response[len(member.output)]
        own = tap("logits", logits[row : row + 1])
        scores.append(_log_prob(own, token, temperature))
        return [token], [0.0]  # a NaN would end the request

    usual = runner.sample
    runner.sample = forced  # type: ignore[method-assign]
    try:
        engine.generate([list(prompt)], params)
    finally:
        runner.sample = usual  # type: ignore[method-assign]
    return scores


def _log_prob(logits: Tensor, token: int, temperature: float) -> float:
    """Sample `token` from logits [1, vocab]; return its log-probability, or NaN."""
    cdf = torch.softmax(logits.float() / temperature, -1)[0].double().cumsum(0)
    before = cdf[token - 1] if token else 0.0
    batch = SamplingBatch.build(
        temperature=[temperature],
        top_k=[0],
        top_p=[1.0],
        counters=[(0, 0, _position(float((before + cdf[token]) / 2 / cdf[-1])))],
        device=logits.device,
    )
    drawn, logprob = deliver(*sample(logits, batch))
    return logprob.item() if drawn.item() == token else math.nan


def _position(number: float) -> int:
    """Return the position at which `uniform` of seed 0 and sample 0 is `number`, in [0, 1)."""
    state = splitmix64_int(splitmix64_int(0))
    return signed(_unmixed(int(number * 2**64)) ^ state)


def _unmixed(x: int) -> int:
    """Invert `splitmix64_int`."""
    for shift, factor in ((31, MUL2), (27, MUL1), (30, GOLDEN)):
        x ^= x >> shift ^ x >> 2 * shift
        x = x * pow(factor, -1, 1 << 64) & MASK64
    return (x - 1) & MASK64
