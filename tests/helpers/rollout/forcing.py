"""Log-probabilities that an engine gives to tokens that are put into its mouth."""

import torch

from rollout import Engine, SamplingParams
from rollout.samples import Chunk, Sample, Step


@torch.inference_mode()
def forced_logprobs(engine: Engine, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """fp32 [len(answer), vocab] on the CPU: what is foretold in place of each token of the answer.

    The prompt is prefilled, the answer decoded token by token. Leaves no request behind.
    """
    handle = engine.blocks.admit()
    assert handle is not None
    sample = Sample(
        request=0, index=0, prompt=prompt, params=SamplingParams(), seed=0, stop_ids=frozenset(),
        handle=handle, prefill_len=len(prompt),
    )  # fmt: skip
    logits = []
    for nth, token in enumerate(answer):
        slots = engine.prefixes.extend([handle], [sample.length])  # evicts what is cached, if it has to
        assert slots is not None
        if nth:
            step = Step(decode=[sample], decode_slots=slots, chunks=[])
        else:
            chunk = Chunk(sample=sample, start=0, length=len(prompt), slots=slots)
            step = Step(decode=[], decode_slots=None, chunks=[chunk])
        logits.append(engine.runner.forward(step)[-1].clone())
        sample.output.append(token)
    engine.blocks.release(handle)
    return torch.stack(logits).float().log_softmax(-1).cpu()


def agreement(engine: Engine, other: Engine, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of each token of the answer: |gap| of its log-probability fp32 [n], and whether both would choose the
    same token greedily, bool [n]."""
    mine, its = (forced_logprobs(each, prompt, answer) for each in (engine, other))
    gap = (mine - its).gather(1, torch.tensor(answer)[:, None]).abs().squeeze(1)
    return gap, mine.argmax(1) == its.argmax(1)
