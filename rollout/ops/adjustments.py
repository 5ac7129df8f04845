"""Changes of logits before a token is chosen: biases, masks and penalties, by sparse entries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

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
        repetition: Divides positive logits of the tokens of `penalties`, multiplies negative ones.
        penalties: Subtracted from the logits of tokens after that.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    repetition: float = 1.0
    penalties: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Adjustments:
    """The changes of several rows, on the device.

    Attributes:
        restricted: Rows of which some tokens alone are allowed, int64 [A].
        allowed: Row among these and id of each allowed token, int64 [2, N].
        biased: Row and id of each token with a bias, int64 [2, B].
        bias: fp32 [B].
        penalized: Row and id of each token with a penalty, int64 [2, P].
        repetition: fp32 [P].
        penalty: fp32 [P].
    """

    restricted: Tensor
    allowed: Tensor
    biased: Tensor
    bias: Tensor
    penalized: Tensor
    repetition: Tensor
    penalty: Tensor

    @classmethod
    def of(cls, rows: Mapping[int, Adjustment], device: torch.device) -> Self:
        """Send the changes of rows, by their numbers, to the device."""
        restricted = [row for row, own in rows.items() if own.allowed is not None]
        allowed, biased, penalized = [], [], []
        for place, row in enumerate(restricted):
            allowed += [(place, token) for token in rows[row].allowed or ()]
        for row, own in rows.items():
            biased += [(row, token, bias) for token, bias in own.bias.items()]
            pairs = own.penalties.items()
            penalized += [(row, token, own.repetition, penalty) for token, penalty in pairs]
        places = [np.array(restricted, np.int64), _columns(allowed, 0, 2)]
        host = [
            *places, _columns(biased, 0, 2), _columns(biased, 2, 3)[0].astype(np.float32),
            _columns(penalized, 0, 2), *_columns(penalized, 2, 4).astype(np.float32),
        ]  # fmt: skip
        return cls(*send_together([torch.from_numpy(part) for part in host], device))

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
        at = tuple(self.biased)
        changed[at] += self.bias
        at = tuple(self.penalized)
        seen = changed[at]
        scaled = torch.where(seen > 0, seen / self.repetition, seen * self.repetition)
        changed[at] = scaled - self.penalty
        return changed


def _columns(rows: Sequence[tuple[float, ...]], first: int, last: int) -> NDArray[Any]:
    """Return columns [first, last) of a table as rows; of an empty one, empty rows."""
    kind = np.int64 if last <= 2 else np.float64
    columns = np.array([row[first:last] for row in rows], dtype=kind).reshape(-1, last - first)
    return np.ascontiguousarray(columns.T)
