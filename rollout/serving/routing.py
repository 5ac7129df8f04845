"""Records which experts tokens went to: layers write it as they compute, answers keep it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.model.mlp import MLP, Experts

RoutedExperts = NDArray[Any]
"""[tokens, layers with experts, top_k], uint8, or int16 of more than 256 experts."""


class RoutingRecorder:
    """Holds what layers leave, outside of every tag: CUDA graphs write to one place for life."""

    def __init__(self, mlps: Iterable[MLP], tokens: int, device: torch.device) -> None:
        """tokens: most of a step. ValueError: no layer has experts."""
        layers = [mlp for mlp in mlps if isinstance(mlp, Experts)]
        if not layers:
            raise ValueError(
                "return_routed_experts=True is for mixtures of experts, and this model is dense; "
                "leave it False"
            )
        config = layers[0].config
        dtype = torch.uint8 if config.experts <= 256 else torch.int16
        shape = (len(layers), tokens, config.top_k)
        self._written = torch.zeros(shape, dtype=dtype, device=device)
        for layer, part in zip(layers, self._written, strict=True):
            layer.routed = part

    def take(self, tokens: int) -> StepRouting:
        """Those of the step's tokens, on their way to the host."""
        found = self._written[:, :tokens].transpose(0, 1).contiguous()
        if not found.is_cuda:
            return StepRouting(found.numpy())
        from rollout.ops.sample_triton import send

        sent = send(found)
        stream = torch.cuda.current_stream(found.device)
        return StepRouting(np.empty_like(sent.numpy()), sent, stream)


@dataclass(eq=False)
class StepRouting:
    """experts: of a step's packed tokens, once they `arrive`. sent: pinned, on this stream."""

    experts: RoutedExperts
    sent: Tensor | None = None
    stream: torch.cuda.Stream | None = None

    def arrive(self, *, waited: bool) -> None:
        """waited: the host has seen the end of the step."""
        if self.sent is not None and self.stream is not None:
            if not waited:
                self.stream.synchronize()
            np.copyto(self.experts, self.sent.numpy())
            self.sent = None


@dataclass(eq=False)
class SampleRouting:
    """The experts of a sample's tokens [start, end): those by which a token was computed first, for
    these made the log-probability of the next one. Not known: what a cache had, and before.
    """

    start: int = 0
    end: int = 0
    parts: list[RoutedExperts] = field(default_factory=list)

    def add(self, first: int, experts: RoutedExperts) -> None:
        """experts: of the tokens from `first` on."""
        if first > self.end or not self.parts:
            self.start = self.end = first
            self.parts = []
        new = experts[self.end - first :]
        if len(new):
            self.parts.append(new)
            self.end += len(new)

    def copy(self) -> SampleRouting:
        return SampleRouting(self.start, self.end, list(self.parts))

    def joined(self) -> RoutedExperts | None:
        """Returns None where nothing was recorded."""
        return np.concatenate(self.parts) if self.parts else None
