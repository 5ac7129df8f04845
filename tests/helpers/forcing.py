"""Log-probabilities that an engine's decoder gives to tokens that are put into its mouth."""

import torch
import torch.nn.functional as F

from rollout import Engine
from rollout.model.mixers.base import Batch
from rollout.ops.attention import BatchShape, plan_attention


@torch.inference_mode()
def forced_logprobs(engine: Engine, ids: list[int]) -> torch.Tensor:
    """fp32 [len(ids) - 1, vocab]: what the tokens before foretell of each but the first. Leaves no request behind."""
    runner, blocks = engine._runner, engine._blocks
    handle = blocks.admit()
    assert handle is not None
    slots = blocks.extend([handle], [len(ids)])
    assert slots is not None
    shape = BatchShape(rows=[handle.row], q_lens=[len(ids)], kv_lens=[len(ids)], num_decode=0)
    batch = Batch(
        positions=torch.arange(len(ids), device=runner.device),
        slots=slots,
        rows=torch.tensor([handle.row], device=runner.device),
        plan=plan_attention(shape, engine._cache.table.req_to_token, engine.config.attention),
        shape=shape,
    )
    hidden = runner._hidden(torch.tensor(ids, device=runner.device), batch)
    blocks.release(handle)
    return F.linear(hidden[:-1], runner._weights.lm_head).float().log_softmax(-1).cpu()
