"""One number for every response token of a batch: each rank computes its share, all get the whole
answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memsaver.common.plain import all_gather_plain
from trainer_bridge.training.batch import MicroBatch, SequenceBatch, deal, pad
from trainer_bridge.training.model import reshard
from trainer_bridge.training.runtime import Runtime


def token_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Returns the logits [N, V], in the model's dtype, that predict `micro`'s N response tokens."""
    needed = torch.arange(micro.first, micro.last + 1, device=micro.input_ids.device)
    logits = model(input_ids=micro.input_ids, use_cache=False, logits_to_keep=needed).logits
    return logits[micro.row, micro.column]


def score_tokens(
    model: nn.Module,
    batch: SequenceBatch,
    score: Callable[[MicroBatch], Tensor],
    micro_batch_size: int,
    runtime: Runtime,
) -> list[list[float]]:
    """Returns what `score` makes of each micro batch, [N] by the model in eval mode, as one list a
    sequence.

    Every rank calls it with the same batch. The model is left sharded.
    """
    model.eval()
    mine: dict[int, list[float]] = {}
    with torch.no_grad():
        for rows in deal(batch, runtime.rank, runtime.world, micro_batch_size):
            micro = pad(batch, rows, runtime.device)
            mine |= micro.split(runtime.numbers(score(micro)))
    reshard(model)
    together = dict[int, list[float]]()
    for share in all_gather_plain(mine) if runtime.world > 1 else [mine]:
        together |= share
    return [together[row] for row in range(len(batch))]
