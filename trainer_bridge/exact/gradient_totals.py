"""Totals to which operations add gradients in order, and which FSDP reduces."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer_bridge.ops.exact import embed, engine_products
from trainer_bridge.ops.gradient_sums import STEP, totals_of


class GradientTotal:
    """The fp32 sum of a parameter's gradients over the micro batches before FSDP reduces it.

    It is the gradient of FSDP's unsharded parameter, to which autograd adds nothing.
    """

    def __init__(self, param: Any) -> None:
        self._param = param

    def apply(self, add: Callable[[Tensor], object]) -> None:
        """Call `add` with the sum, fp32 of the parameter's unsharded shape."""
        add(self._sum())

    def _sum(self) -> Tensor:
        unsharded = self._param._unsharded_param
        if unsharded.grad is None:
            unsharded.grad_dtype = torch.float32
            unsharded.grad = _zeros(self._param)
        total: Tensor = unsharded.grad
        return total


class EmbeddingTotal(GradientTotal):
    """The sum of an embedding whose matrix is also the output embedding.

    The gradients of both would alternate, once in each micro batch. So this sum is separate, and
    is added to the other one before FSDP reduces it.
    """

    def __init__(self, param: Any, group: Any) -> None:
        super().__init__(param)
        self._group = group

    def apply(self, add: Callable[[Tensor], object]) -> None:
        if self._param.embedding_grad is None:
            self._param.embedding_grad = _zeros(self._param)
        add(self._param.embedding_grad)
        if self._group.reduce_grads:
            self._sum().add_(self._param.embedding_grad)
            self._param.embedding_grad = None


def _zeros(param: Any) -> Tensor:
    return torch.zeros_like(param._unsharded_param, dtype=torch.float32)


def add_totals(model: Any, groups: Iterable[Any]) -> None:
    """Give the modules of a sharded exact model a total for each of their parameters.

    `groups` are FSDP's groups of parameters. The last operation of a backward pass is the
    embedding's.
    """
    embedding = model.get_input_embeddings()
    embedding.forward = partial(_embed, embedding)
    model.token_step = STEP  # of which each sequence of a micro batch must have a multiple
    model.backward_products = partial(engine_products, embedding.weight.device)
    tied = embedding.weight is model.get_output_embeddings().weight
    for group in groups:
        for param in group.fsdp_params:
            param.embedding_grad = None
            info = param._module_info
            owners = [(info.module, info.param_name)]
            owners += zip(info.shared_modules, info.shared_param_names, strict=True)
            for module, name in owners:
                apart = tied and module is embedding
                total = EmbeddingTotal(param, group) if apart else GradientTotal(param)
                module.totals = {**(totals_of(module) or {}), name: total}


def _embed(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    totals = totals_of(embedding)
    assert totals is not None
    return embed(ids, embedding.weight, totals)
