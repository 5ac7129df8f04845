"""Gated delta nets (linear layers of Qwen3-Next): a convolution and a recurrent state instead of
keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.requests import HybridReqToTokenPool
from rollout.model.mixers.base import Batch, LayerParts, MixerConfig
from rollout.ops.row_wise import linear, rms_norm
from rollout.ops.torch_attention import BatchShape
from rollout.weights.params import ParamGroup, Split, Splits, one, stack


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(MixerConfig):
    """Value heads share key heads, `num_value_heads / num_key_heads` each.

    kernel: of the convolution, in tokens.
    """

    capturable = False  # a step's tokens are cut into requests on the CPU

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values, all of which are convolved."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def shared(self) -> int:
        """Value heads a key head."""
        return self.num_value_heads // self.num_key_heads

    def groups(self, hidden_size: int, layer: str) -> list[ParamGroup]:
        net, channels, values = layer + "linear_attn.", sum(self.widths), self.widths[2]
        inputs = (("in_proj_qkvz", channels + values), ("in_proj_ba", 2 * self.num_value_heads))
        stacked = [(f"{net}{name}.weight", (rows, hidden_size)) for name, rows in inputs]
        return [
            stack(net + "in_proj.weight", stacked),
            one(net + "conv1d.weight", channels, 1, self.kernel),
            one(net + "dt_bias", self.num_value_heads),
            one(net + "A_log", self.num_value_heads),
            one(net + "norm.weight", self.value_dim),
            one(net + "out_proj.weight", hidden_size, values),
        ]

    def splits(self) -> Splits:
        """Shares by key heads, each with the value heads that share it."""
        keys, values = self.key_dim, self.shared * self.value_dim
        units = {
            "in_proj_qkvz.weight": (2 * keys + 2 * values,),
            "in_proj_ba.weight": (2 * self.shared,),
            "conv1d.weight": (keys, keys, values),
            "dt_bias": (self.shared,),
            "A_log": (self.shared,),
        }
        found = {f"linear_attn.{name}": [Split(dim=0, units=each)] for name, each in units.items()}
        return {**found, "linear_attn.out_proj.weight": [Split(dim=1, units=(values,))]}

    def of_rank(self, size: int) -> DeltaNetConfig:
        keys, values = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=keys, num_value_heads=values)

    def build(self, index: int, parts: LayerParts) -> DeltaNet:
        return DeltaNet(self, index, parts)


class DeltaNet:
    """Weights and states are views; they stay valid over pause and resume.

    A request's states are those after its last computed token: zeros at admission, advanced by each
    of its tokens once.
    """

    def __init__(self, config: DeltaNetConfig, index: int, parts: LayerParts) -> None:
        self.config = config
        name, store = f"model.layers.{index}.linear_attn.", parts.store
        self._in = store.tensor(name + "in_proj.weight")
        self._conv = store.tensor(name + "conv1d.weight")
        self._dt_bias, self._a_log = store.tensor(name + "dt_bias"), store.tensor(name + "A_log")
        self._norm = store.tensor(name + "norm.weight")
        self._out = store.tensor(name + "out_proj.weight")
        self._eps, self._ranks = parts.norm_eps, parts.ranks
        self._stage = f"linear attention of layer {index}"
        table = parts.table
        assert isinstance(table, HybridReqToTokenPool), "a model with linear layers has states"
        self._slot_of = table.req_to_mamba
        nth = parts.layout.layers("linear").index(index)
        (self._conv_states,), self._states = table.mamba.states(nth)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.shape is not None, "not capturable"
        mixed, z, beta, decay = self._project(x)
        slots = self._slot_of[batch.rows].long()
        out = torch.empty_like(z)
        for requests, tokens, length in _segments(batch.shape):
            inputs = (each[tokens].unflatten(0, (-1, length)) for each in (mixed, beta, decay))
            channels, betas, decays = inputs
            advanced = self._advance(channels, betas, decays, slots[requests])
            out[tokens] = advanced.flatten(0, 1).to(x.dtype)
        out = rms_norm(out, self._norm, self._eps) * F.silu(z.float())
        out = linear(out.to(x.dtype).flatten(1), self._out)
        return self._ranks.sum(out, self._stage)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, hidden] -> what is convolved [T, channels], gate [T, Hv, Dv], beta and decay [T,
        Hv], the last fp32.
        """
        config = self.config
        ba_width = 2 * config.num_value_heads
        qkvz, ba = linear(x, self._in).split((len(self._in) - ba_width, ba_width), dim=1)
        values = config.shared * config.value_dim
        by_key_head = qkvz.unflatten(1, (config.num_key_heads, -1))
        *qkv, z = by_key_head.split((config.key_dim, config.key_dim, values, values), dim=2)
        halves = ba.unflatten(1, (config.num_key_heads, -1)).chunk(2, dim=2)
        b, a = (each.flatten(1) for each in halves)
        decay = -self._a_log.float().exp() * F.softplus(a.float() + self._dt_bias)
        gate = z.reshape(len(x), config.num_value_heads, config.value_dim)
        return torch.cat([each.flatten(1) for each in qkv], dim=1), gate, b.sigmoid(), decay

    def _advance(self, mixed: Tensor, beta: Tensor, decay: Tensor, slots: Tensor) -> Tensor:
        """The next n tokens of B requests, [B, n, channels], [B, n, Hv] twice -> fp32 [B, n, Hv,
        Dv]; states in `slots` (int64 [B]) are those after these tokens then.
        """
        config = self.config
        mixed, self._conv_states[slots] = causal_conv(mixed, self._conv_states[slots], self._conv)
        dims = config.key_dim, config.key_dim, config.value_dim
        parts = zip(mixed.split(config.widths, dim=2), dims, strict=True)
        q, k, v = (each.unflatten(2, (-1, dim)) for each, dim in parts)
        q, k = (each.repeat_interleave(config.shared, dim=2) for each in (q, k))
        out, self._states[slots] = gated_delta_rule(q, k, v, decay, beta, self._states[slots])
        return out


def _segments(shape: BatchShape) -> Iterator[tuple[slice, slice, int]]:
    """(requests, their tokens, tokens of each request): all decode requests at once, then each
    prefill chunk.
    """
    start = shape.num_decode
    if start:
        yield slice(0, start), slice(0, start), 1
    for request, length in enumerate(shape.q_lens[start:], start=start):
        yield slice(request, request + 1), slice(start, start + length), length
        start += length


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
