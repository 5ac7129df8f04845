"""Tells how a model rotates its heads: what its config says, and the tables made from that."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.ops import RotaryTables

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. factor: linear and llama3; the last three: llama3 only."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type={self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """fp32 [dim / 2] on the CPU, in transformers' order of operations."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between
    interpolated.
    """
    context = rope.original_max_position_embeddings
    low_wavelen, high_wavelen = context / rope.low_freq_factor, context / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / rope.factor, inv_freq)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (context / wavelen - rope.low_freq_factor) / span
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(medium, smoothed, scaled)


def rotary_tables(rope: RopeConfig, dim: int, positions: int, device: torch.device) -> RotaryTables:
    """The tables of positions 0..positions - 1 for heads of which `dim` elements are rotated.

    They are plain torch memory outside every tag: they survive any sleep.
    """
    inv_freq = inverse_frequencies(rope, dim).to(device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inv_freq
    return RotaryTables(cos=angles.cos(), sin=angles.sin())
