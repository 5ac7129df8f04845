"""Rotary embedding. The tables are plain torch memory outside every tag: they survive any sleep."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """fp32 [dim / 2] on the CPU, in transformers' order of operations."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    context = rope.original_max_position_embeddings
    low_wavelen, high_wavelen = context / rope.low_freq_factor, context / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / rope.factor, inv_freq)
    smooth = (context / wavelen - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(medium, smoothed, scaled)


@dataclass(frozen=True, kw_only=True)
class RotaryTables:
    """cos, sin: fp32 [positions, dim / 2], dim being how much of a head is rotated."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, rope: RopeConfig, dim: int, positions: int, device: torch.device) -> "RotaryTables":
        inv_freq = inverse_frequencies(rope, dim).to(device)
        angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inv_freq
        return cls(cos=angles.cos(), sin=angles.sin())

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, dim / 2] of int64 positions, in the dtype of the heads they multiply."""
        return self.cos[positions].to(dtype).unsqueeze(1), self.sin[positions].to(dtype).unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of heads x [tokens, heads, head_dim]; their halves are pairs, as in
    Hugging Face checkpoints."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = rest
    return out
