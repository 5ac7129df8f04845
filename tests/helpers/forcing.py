"""Log-probabilities that an engine's decoder gives to tokens that are put into its mouth."""

import torch
import torch.nn.functional as F

from rollout import Engine
from rollout.model.mixers.base import Batch
from rollout.ops.attention import BatchShape, plan_attention


@torch.inference_mode()
def forced_logprobs(engine: Engine, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """fp32 [len(answer), vocab] on the CPU: what is foretold in place of each token of the answer.

    The prompt is prefilled, the answer decoded token by token. Leaves no request behind.
    """
    handle = engine.blocks.admit()
    assert handle is not None
    ids = prompt + answer
    steps = [(0, len(prompt)), *((at, at + 1) for at in range(len(prompt), len(ids) - 1))]
    logits = []
    for start, stop in steps:
        slots = engine.prefixes.extend([handle], [stop])  # evicts what is cached, if it has to
        assert slots is not None
        shape = BatchShape(rows=[handle.row], q_lens=[stop - start], kv_lens=[stop], num_decode=int(start > 0))
        logits.append(_forward(engine, ids[start:stop], start, slots, shape)[-1])
    engine.blocks.release(handle)
    return torch.stack(logits).float().log_softmax(-1).cpu()


def _forward(engine: Engine, ids: list[int], start: int, slots: torch.Tensor, shape: BatchShape) -> torch.Tensor:
    """Logits [len(ids), vocab] of one request's tokens."""
    runner = engine.runner
    batch = Batch(
        positions=torch.arange(start, start + len(ids), device=runner.device),
        slots=slots,
        rows=torch.tensor(shape.rows, device=runner.device),
        plan=plan_attention(shape, engine.cache.table.req_to_token, engine.config.attention),
        shape=shape,
    )
    hidden = runner._hidden(torch.tensor(ids, device=runner.device), batch)
    return F.linear(hidden, runner._weights.lm_head)


def agreement(engine: Engine, other: Engine, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of each token of the answer: |gap| of its log-probability fp32 [n], and whether both would choose the
    same token greedily, bool [n]."""
    mine, its = (forced_logprobs(each, prompt, answer) for each in (engine, other))
    gap = (mine - its).gather(1, torch.tensor(answer)[:, None]).abs().squeeze(1)
    return gap, mine.argmax(1) == its.argmax(1)
