"""What the parameters of a request change in the logits of its samples."""

import math
from collections import Counter

from rollout.ops.adjustments import Adjustment
from rollout.scheduling.samples import Sample


def adjustment_of(sample: Sample, place: int) -> Adjustment:
    """Return how the logits of a sample's next token are changed.

    Args:
        sample: The sample; its answer is complete if it looks back.
        place: Number of tokens of the answer, including those that steps under way choose.
    """
    params = sample.params
    bias = dict(params.logit_bias)
    if place < params.min_tokens:
        bias |= dict.fromkeys(sample.stop_ids, -math.inf)
    answer = sample.output if params.penalized or params.bad_words else []
    for *first, last in params.bad_words:
        if len(first) <= len(answer) and answer[len(answer) - len(first) :] == first:
            bias[last] = -math.inf
    penalties = dict.fromkeys(sample.prompt_ids, 0.0) if params.repetition_penalty != 1 else {}
    if params.penalized:
        for token, count in Counter(answer).items():
            penalties[token] = params.presence_penalty + count * params.frequency_penalty
    mask = None if sample.guide is None else sample.guide.mask(sample.output)
    return Adjustment(bias, params.allowed_token_ids, mask, params.repetition_penalty, penalties)
