"""The gated delta rule and the causal convolution before it, in torch: what a gated delta net does
along time.

Both take tokens [B, n, ...] that continue B requests from their states, and return the states after
the last of them: a decode step is n = 1. Written in the shape of transformers' chunked form, which
solves a block of tokens at once.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens solved at once, as in transformers


def causal_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU of a depthwise convolution: x [B, n, C], state [B, C, K - 1] (the inputs before x),
    weight [C, 1, K], one dtype -> ([B, n, C], state).
    """
    window = torch.cat((state, x.transpose(1, 2)), dim=2)
    out = F.silu(F.conv1d(window, weight, groups=len(weight)))
    return out.transpose(1, 2), window[:, :, x.shape[1] :]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """For every token, `state *= exp(decay); state += k (beta (v - k state)); out = q state`, in
    fp32.

    q, k [B, n, H, D], normalised and q scaled here; v [B, n, H, Dv]; decay (a logarithm, <= 0) and
    beta [B, n, H]; state fp32 [B, H, D, Dv] -> (fp32 [B, n, H, Dv], state).
    """
    q, k = _l2norm(q.float()) * q.shape[-1] ** -0.5, _l2norm(k.float())
    tokens = [each.float().transpose(1, 2) for each in (q, k, v, decay, beta)]
    outs = []
    for first in range(0, v.shape[1], BLOCK):
        out, state = _solve_block([each[:, :, first : first + BLOCK] for each in tokens], state)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), state


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _solve_block(tokens: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The next n <= BLOCK tokens: q, k [B, H, n, D], v [B, H, n, Dv], decay, beta [B, H, n], all
    fp32.

    What token i writes is beta_i (v_i - k_i state_i), and state_i holds what tokens before i wrote,
    decayed: a triangular system in the writes.
    """
    q, k, v, decay, beta = tokens
    total = decay.cumsum(-1)  # since the block began
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    kept = total.exp().unsqueeze(-1)
    wanted = beta.unsqueeze(-1) * (v - (k * kept) @ state)
    system = (k * beta.unsqueeze(-1)) @ k.transpose(-1, -2) * between
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * kept) @ state + (q @ k.transpose(-1, -2) * between) @ written
    # what is left of each token's write at the end of the block
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    return out, state * kept[:, :, -1:] + (k * left).transpose(-1, -2) @ written
