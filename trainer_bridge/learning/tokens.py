"""Numbers of the tokens of some answers, in one array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]
"""Numbers of all tokens, answer by answer."""


@dataclass(frozen=True, eq=False)
class Tokens(Sequence[list[Any]]):
    """A number for each token of some answers, which pickles, selects and computes as one array.

    It is a sequence of the answers' lists, and equals lists of the same numbers.

    Attributes:
        values: Numbers of all tokens, answer by answer, [N].
        lengths: Tokens of each answer, int64.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.values) != self.lengths.sum():
            total = f"{len(self.values)} numbers for answers of {self.lengths.sum()} tokens"
            raise ValueError(f"{total}; pass one number for each token")

    @classmethod
    def of(cls, rows: Rows, dtype: Any = None) -> Tokens:
        """Return the numbers of some answers.

        Args:
            rows: Tokens, or a sequence of numbers for each answer.
            dtype: Dtype of the numbers; None: that of Tokens, or fp64.
        """
        if isinstance(rows, Tokens):
            return (
                rows if dtype is None else rows.with_values(rows.values.astype(dtype, copy=False))
            )
        dtype = np.float64 if dtype is None else dtype
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        if any(isinstance(row, np.ndarray) for row in rows):
            values: NDArray[Any] = np.concatenate([np.asarray(row, dtype) for row in rows])
        else:
            values = np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum()))
        return cls(values, lengths)

    @classmethod
    def joined(cls, parts: Iterable[Tokens]) -> Tokens:
        """Return the answers of all parts in their order."""
        parts = list(parts)
        values = np.concatenate([part.values for part in parts])
        return cls(values, np.concatenate([part.lengths for part in parts]))

    def with_values(self, values: ArrayLike) -> Tokens:
        """Return other numbers of the same tokens."""
        return Tokens(np.asarray(values), self.lengths)

    def select(self, answers: Sequence[int]) -> Tokens:
        """Return the numbers of the answers with these indices, in their order."""
        chosen = np.asarray(answers, np.int64)
        lengths = self.lengths[chosen]
        places = np.repeat((self._ends - self.lengths)[chosen], lengths) + places_of(lengths)
        return Tokens(self.values[places], lengths)

    def where(self, taken: Tokens) -> Tokens:
        """Return the numbers of the tokens for which `taken` is true."""
        counts = np.concatenate([[0], np.cumsum(taken.values)])
        ends = taken.lengths.cumsum()
        return Tokens(self.values[taken.values], counts[ends] - counts[ends - taken.lengths])

    def spread(self, taken: Tokens) -> Tokens:
        """Return numbers of all tokens, 0 where `taken` is false; the inverse of `where`."""
        values = np.zeros(len(taken.values))
        values[taken.values] = self.values
        return taken.with_values(values)

    def answers_at(self, taken: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return, for each token that the mask `taken` [N] selects, the index of its answer."""
        return np.repeat(np.arange(len(self)), self.lengths)[taken]

    def runs(self, answer: int) -> list[list[Any]]:
        """Return the numbers of an answer as [number, tokens] for each run of equal ones."""
        return [[number, len([*run])] for number, run in groupby(self[answer])]

    def array(self, answer: int) -> NDArray[Any]:
        """Return the numbers of an answer, as a part of `values`."""
        end = int(self._ends[answer])
        return self.values[end - int(self.lengths[answer]) : end]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, answer: Any) -> Any:
        if isinstance(answer, slice):
            return [self[i] for i in range(*answer.indices(len(self)))]
        return self.array(range(len(self))[answer]).tolist()

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


Rows = Sequence[Sequence[float]] | Sequence[NDArray[Any]]
"""Numbers of the tokens of some answers, as they may be passed."""


def places_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each token in its answer."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def log_ratios(first: Rows, second: Rows) -> Numbers:
    """Return second - first for every token, in fp64.

    Raises:
        ValueError: The two differ in the tokens of an answer.
    """
    before, after = Tokens.of(first), Tokens.of(second)
    if not np.array_equal(before.lengths, after.lengths):
        lengths = before.lengths.tolist(), after.lengths.tolist()
        raise ValueError(f"log-probabilities of {lengths[0]} and of {lengths[1]} tokens")
    return np.subtract(after.values, before.values, dtype=np.float64)


def unequal_places(first: ArrayLike, second: ArrayLike) -> list[int]:
    """Return where two sequences of log-probabilities differ in fp32."""
    ours, theirs = (np.asarray(values, np.float32) for values in (first, second))
    return np.flatnonzero(ours != theirs).tolist()
