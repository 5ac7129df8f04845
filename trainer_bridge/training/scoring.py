"""Passes of a model over a batch, shared by the ranks: a number a token, or a loss's gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memsaver.common.plain import all_gather_plain
from trainer_bridge.training.batch import MicroBatch, SequenceBatch, check_tokens, deal, lay_out
from trainer_bridge.training.head import ScoringHead
from trainer_bridge.training.losses import token_logprobs
from trainer_bridge.training.model import reshard
from trainer_bridge.training.packing import packs
from trainer_bridge.training.runtime import Runtime


def token_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Returns the logits [N, V], in the model's dtype, that predict `micro`'s N response tokens."""
    logits = model(**micro.inputs(), logits_to_keep=micro.kept).logits
    return logits[micro.row, micro.column]


def micro_logprobs(model: Any, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns fp32 [N] log-probabilities and entropies of a micro batch's response tokens."""
    head = model.get_output_embeddings()
    if not isinstance(head, ScoringHead):
        return token_logprobs(token_logits(model, micro), micro.target, temperature)
    at = micro.row * micro.input_ids.shape[1] + micro.kept[micro.column]
    with head.scoring(at, micro.target, temperature):
        logprobs, entropy = model(**micro.inputs()).logits
    return logprobs, entropy.detach()


def score_tokens(
    model: nn.Module,
    batch: SequenceBatch,
    score: Callable[[MicroBatch], Tensor],
    micro_batch_size: int,
    runtime: Runtime,
) -> list[list[float]]:
    """Returns what `score` makes of each micro batch, [N] by the model in eval mode, as one list a
    sequence.

    Every rank calls it with the same batch. The model is left sharded. Raises a ValueError as
    `check_tokens` does.
    """
    check_tokens(batch, model.config)
    model.eval()
    mine: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro in _micro_batches(model, batch, micro_batch_size, runtime):
            mine |= micro.split(runtime.numbers(score(micro)))
    reshard(model)
    together = dict[int, list[float]]()
    for share in all_gather_plain(mine) if runtime.world > 1 else [mine]:
        together |= share
    return [together[row] for row in range(len(batch))]


def add_gradients(
    model: nn.Module,
    batch: SequenceBatch,
    backward: Callable[[MicroBatch], list[float]],
    micro_batch_size: int,
    runtime: Runtime,
) -> list[float]:
    """Has `backward` add the gradient of each micro batch, by the model in training mode.

    Every rank calls it with the same batch. Returns the sums that `backward` returns, of all ranks,
    divided by the number of the batch's response tokens.
    """
    model.train()
    parts = [*map(backward, _micro_batches(model, batch, micro_batch_size, runtime))]
    sums = runtime.sum_ranks([sum(column) for column in zip(*parts, strict=True)])
    return [total / batch.num_tokens for total in sums]


def _micro_batches(
    model: nn.Module, batch: SequenceBatch, size: int, runtime: Runtime
) -> Iterator[MicroBatch]:
    packed = packs(model)
    for rows in deal(batch, runtime.rank, runtime.world, size, packed=packed):
        yield lay_out(batch, rows, runtime.device, size, packed=packed)
