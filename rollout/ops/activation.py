"""The gated activation of the MLP: dispatch, and the torch reference."""

import torch.nn.functional as F
from torch import Tensor

from memsaver.common.machine import Impl, use_triton


def silu_mul(gate_up: Tensor, impl: Impl = "auto") -> Tensor:
    """silu(gate) * up: [T, 2I], gate first, rows anywhere, elements of a row contiguous ->
    contiguous [T, I].

    silu is computed in fp32 and rounded to the model dtype before the product, as transformers
    does.
    """
    if use_triton(impl, gate_up.device):
        from rollout.ops.activation_triton import silu_mul_triton

        return silu_mul_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
