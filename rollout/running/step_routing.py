"""Record which experts the tokens of a step went to."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.model.decoder import MLP, Experts
from rollout.ops.token_sampling import send
from rollout.scheduling.samples import RoutedExperts


class RoutingRecorder:
    """Buffer that receives the experts of a step's tokens from the layers; it is on no tag.

    CUDA graphs always write to the same addresses.
    """

    def __init__(self, mlps: Iterable[MLP], tokens: int, device: torch.device) -> None:
        """Allocate the buffer for steps of at most `tokens` tokens."""
        layers = [mlp for mlp in mlps if isinstance(mlp, Experts)]
        config = layers[0].config
        dtype = torch.uint8 if config.experts <= 256 else torch.int16
        shape = (len(layers), tokens, config.top_k)
        self._written = torch.zeros(shape, dtype=dtype, device=device)
        for layer, part in zip(layers, self._written, strict=True):
            layer.routed = part
        self._taken: list[StepRouting] = []  # whose experts may not have arrived

    def take(self, tokens: int) -> "StepRouting":
        """Copy the experts of the step's tokens; on a GPU, start the copy to the host."""
        written = self._written[:, :tokens].transpose(0, 1)
        if not written.is_cuda:
            return StepRouting(written.numpy().copy())
        sent, copied = send(written.contiguous())
        self._taken = [taken for taken in self._taken if taken.sent is not None]
        self._taken.append(StepRouting(np.empty_like(sent.numpy()), sent, copied))
        return self._taken[-1]

    def arrive(self) -> None:
        """Fill the experts of all steps, after a failure of one: their samples have them."""
        for taken in self._taken:
            taken.arrive()


@dataclass(eq=False)
class StepRouting:
    """Experts of a step's packed tokens."""

    experts: RoutedExperts  # undefined before `arrive` if they come from a GPU
    sent: Tensor | None = None  # pinned target of the copy from the GPU
    copied: torch.cuda.Event | None = None  # the end of that copy

    def arrive(self) -> None:
        """Wait for the copy, and fill `experts`."""
        if self.sent is not None and self.copied is not None:
            self.copied.synchronize()
            np.copyto(self.experts, self.sent.numpy())
            self.sent = None
