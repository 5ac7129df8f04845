"""Gated delta nets (linear layers of Qwen3-Next).

A request has a convolution state and a recurrent state instead of keys and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.request_tables import HybridReqToTokenPool
from rollout.model.mixers.base import Batch, LayerParts, MixerConfig
from rollout.ops.row_wise import linear, rms_norm
from rollout.ops.torch_attention import BatchShape
from rollout.weights.params import ParamGroup, Split, Splits, one, stack


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(MixerConfig):
    """A gated delta net of one layer."""

    capturable = False  # the CPU splits a step's tokens by request

    num_key_heads: int  # heads of queries and keys
    num_value_heads: int  # a multiple of `num_key_heads`
    key_dim: int  # elements of a query or key head
    value_dim: int  # elements of a value head
    kernel: int  # length of the convolution in tokens

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the number of channels of queries, keys and values, which are all convolved."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def shared(self) -> int:
        """Return the number of value heads per key head."""
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
        """Return how ranks share the parameters: each rank has key heads and their value heads."""
        keys, values = self.key_dim, self.shared * self.value_dim
        units = {
            "in_proj_qkvz.weight": (2 * keys + 2 * values,),
            "in_proj_ba.weight": (2 * self.shared,),
            "conv1d.weight": (keys, keys, values),
            "dt_bias": (self.shared,),
            "A_log": (self.shared,),
        }
        splits = {f"linear_attn.{name}": [Split(dim=0, units=unit)] for name, unit in units.items()}
        return {**splits, "linear_attn.out_proj.weight": [Split(dim=1, units=(values,))]}

    def of_rank(self, size: int) -> "DeltaNetConfig":
        keys, values = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=keys, num_value_heads=values)

    def build(self, index: int, parts: LayerParts) -> "DeltaNet":
        return DeltaNet(self, index, parts)


class DeltaNet:
    """Gated delta net over views of weights and states, valid across pause and resume.

    A request's states are zeros at admission, and each of its tokens advances them once.
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
        assert batch.shape is not None, "not capturable by a CUDA graph"
        mixed, z, beta, decay = self._project(x)
        slots = self._slot_of[batch.rows].long()
        out = torch.empty_like(z)
        for requests, tokens, length in _segments(batch.shape):
            packed = (mixed, beta, decay)
            channels, betas, decays = (part[tokens].unflatten(0, (-1, length)) for part in packed)
            advanced = self._advance(channels, betas, decays, slots[requests])
            out[tokens] = advanced.flatten(0, 1).to(x.dtype)
        out = rms_norm(out, self._norm, self._eps) * F.silu(z.float())
        out = linear(out.to(x.dtype).flatten(1), self._out)
        return self._ranks.sum(out, self._stage)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project x [T, hidden].

        Returns:
            Input of the convolution [T, channels], gate [T, Hv, Dv], beta [T, Hv], and decay fp32
            [T, Hv].
        """
        config = self.config
        ba_width = 2 * config.num_value_heads
        qkvz, ba = linear(x, self._in).split((len(self._in) - ba_width, ba_width), dim=1)
        values = config.shared * config.value_dim
        by_key_head = qkvz.unflatten(1, (config.num_key_heads, -1))
        *qkv, z = by_key_head.split((config.key_dim, config.key_dim, values, values), dim=2)
        halves = ba.unflatten(1, (config.num_key_heads, -1)).chunk(2, dim=2)
        b, a = (half.flatten(1) for half in halves)
        decay = -self._a_log.float().exp() * F.softplus(a.float() + self._dt_bias)
        gate = z.reshape(len(x), config.num_value_heads, config.value_dim)
        return torch.cat([part.flatten(1) for part in qkv], dim=1), gate, b.sigmoid(), decay

    def _advance(self, mixed: Tensor, beta: Tensor, decay: Tensor, slots: Tensor) -> Tensor:
        """Advance the states of B requests by n tokens each.

        `mixed`, the input of the convolution, is [B, n, channels]; `beta` and `decay` are
        [B, n, Hv]. The states in `slots`, int64 [B], are overwritten.

        Returns:
            Outputs, fp32 [B, n, Hv, Dv].
        """
        config = self.config
        mixed, self._conv_states[slots] = causal_conv(mixed, self._conv_states[slots], self._conv)
        dims = config.key_dim, config.key_dim, config.value_dim
        parts = zip(mixed.split(config.widths, dim=2), dims, strict=True)
        q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in parts)
        q, k = (heads.repeat_interleave(config.shared, dim=2) for heads in (q, k))
        out, self._states[slots] = gated_delta_rule(q, k, v, decay, beta, self._states[slots])
        return out


def _segments(shape: BatchShape) -> Iterator[tuple[slice, slice, int]]:
    """Yield (requests, tokens, tokens per request) for all decode requests, then for each chunk."""
    start = shape.num_decode
    if start:
        yield slice(0, start), slice(0, start), 1
    for request, length in enumerate(shape.q_lens[start:], start=start):
        yield slice(request, request + 1), slice(start, start + length), length
        start += length


BLOCK = 64  # tokens solved together, as in transformers


def causal_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a causal depthwise convolution and SiLU of x [B, n, C].

    `state` are the K - 1 inputs before x, [B, C, K - 1], and `weight` is [C, 1, K], both of x's
    dtype.

    Returns:
        Outputs [B, n, C], and the next state.
    """
    window = torch.cat((state, x.transpose(1, 2)), dim=2)
    out = F.silu(F.conv1d(window, weight, groups=len(weight)))
    return out.transpose(1, 2), window[:, :, x.shape[1] :]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule in fp32, a block of tokens at a time.

    For every token: `state *= exp(decay); state += k (beta (v - k state)); out = q state`.

    Args:
        q: Queries [B, n, H, D]; normalized and scaled here.
        k: Keys [B, n, H, D]; normalized here.
        v: Values [B, n, H, Dv].
        decay: Logarithm of the decay, at most 0, [B, n, H].
        beta: [B, n, H].
        state: State before the tokens, fp32 [B, H, D, Dv].

    Returns:
        Outputs fp32 [B, n, H, Dv], and the state after the tokens.
    """
    q, k = _l2norm(q.float()) * q.shape[-1] ** -0.5, _l2norm(k.float())
    tokens = [part.float().transpose(1, 2) for part in (q, k, v, decay, beta)]
    outs = []
    for first in range(0, v.shape[1], BLOCK):
        out, state = _solve_block([part[:, :, first : first + BLOCK] for part in tokens], state)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), state


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _solve_block(tokens: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to n <= BLOCK tokens.

    Token i writes beta_i (v_i - k_i state_i) to the state, and state_i contains the decayed writes
    of the tokens before i. The writes are therefore the solution of a triangular system.

    `tokens` are q and k [B, H, n, D], v [B, H, n, Dv], decay and beta [B, H, n], and `state` is
    [B, H, D, Dv], all fp32.

    Returns:
        Outputs [B, H, n, Dv], and the state after the tokens.
    """
    q, k, v, decay, beta = tokens
    total = decay.cumsum(-1)  # since the start of the block
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    kept = total.exp().unsqueeze(-1)
    wanted = beta.unsqueeze(-1) * (v - (k * kept) @ state)
    system = (k * beta.unsqueeze(-1)) @ k.transpose(-1, -2) * between
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * kept) @ state + (q @ k.transpose(-1, -2) * between) @ written
    # decay of each token's write until the end of the block
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    return out, state * kept[:, :, -1:] + (k * left).transpose(-1, -2) @ written
