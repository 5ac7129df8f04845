"""Changes of logits before a token is chosen: biases, masks and penalties, by sparse entries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memsaver.ops.layout import send_together


@dataclass(frozen=True)
class Adjustment:
    """How the logits of one row are changed, on the host.

    Attributes:
        bias: Added to the logits of tokens; -inf bans one.
        allowed: The only tokens that may be chosen; None: all.
        mask: The same as a bit for each token, int32 [words]; None: all.
        repetition: Divides positive logits of the tokens of `penalties`, multiplies negative ones.
        penalties: Subtracted from the logits of tokens after that.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    mask: NDArray[np.int32] | None = None
    repetition: float = 1.0
    penalties: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Adjustments:
    """The changes of several rows, on the device.

    Attributes:
        restricted: Rows of which some tokens alone are allowed, int64 [A].
        allowed: Row among these and id of each allowed token, int64 [2, N].
        masked: Rows with a mask, int64 [M].
        masks: A bit for each of their tokens that may be chosen, int32 [M, words].
        biased: Row and id of each token with a bias, int64 [2, B].
        bias: fp32 [B].
        penalized: Row and id of each token with a penalty, int64 [2, P].
        repetition: fp32 [P].
        penalty: fp32 [P].
    """

    restricted: Tensor
    allowed: Tensor
    masked: Tensor
    masks: Tensor
    biased: Tensor
    bias: Tensor
    penalized: Tensor
    repetition: Tensor
    penalty: Tensor

    @classmethod
    def of(cls, rows: Mapping[int, Adjustment], device: torch.device) -> Self:
        """Send the changes of rows, by their numbers, to the device."""
        restricted, allowed = list[int](), list[tuple[int, int]]()
        biased, penalized = list[tuple[int, int]](), list[tuple[int, int]]()
        bias, repetition, penalty = list[float](), list[float](), list[float]()
        for row, own in rows.items():
            if own.allowed is not None:
                allowed += [(len(restricted), token) for token in own.allowed]
                restricted.append(row)
            biased += [(row, token) for token in own.bias]
            bias += own.bias.values()
            penalized += [(row, token) for token in own.penalties]
            penalty += own.penalties.values()
            repetition += [own.repetition] * len(own.penalties)
        masks = {row: own.mask for row, own in rows.items() if own.mask is not None}
        bits = np.stack([*masks.values()]) if masks else np.zeros((0, 1), np.int32)
        whole = [torch.tensor(part, dtype=torch.int64) for part in (restricted, [*masks])]
        numbers = [torch.tensor(part, dtype=torch.float32) for part in (bias, repetition, penalty)]
        host = [whole[0], _places(allowed), whole[1], torch.from_numpy(bits), _places(biased)]
        host += [numbers[0], _places(penalized), *numbers[1:]]
        return cls(*send_together(host, device))

    def apply(self, logits: Tensor) -> Tensor:
        """Return changed logits.

        Args:
            logits: fp32 [R, vocab].

        Returns:
            fp32 [R, vocab].
        """
        changed = logits.clone()
        if len(self.restricted):
            own = changed[self.restricted]
            kept = torch.full_like(own, -torch.inf)
            at = tuple(self.allowed)
            changed[self.restricted] = kept.index_put(at, own[at])
        if len(self.masked):
            token = torch.arange(logits.shape[1], device=logits.device)
            bits = self.masks[:, token // 32] >> token % 32 & 1
            changed[self.masked] = changed[self.masked].masked_fill(bits == 0, -torch.inf)
        at = tuple(self.biased)
        changed[at] += self.bias
        at = tuple(self.penalized)
        seen = changed[at]
        scaled = torch.where(seen > 0, seen / self.repetition, seen * self.repetition)
        changed[at] = scaled - self.penalty
        return changed


def _places(pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Return pairs of a row and a token, int64 [2, N]."""
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
