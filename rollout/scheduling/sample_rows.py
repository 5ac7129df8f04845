"""The state of running samples that every step reads and changes, in arrays.

A step of many samples takes a few array operations, and no Python for each sample.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.allocators import Int64Array
from rollout.ops.adjustments import Adjustment
from rollout.scheduling.adjusting import adjustment_of
from rollout.scheduling.samples import Sample


class SampleRows:
    """Running samples by row of the request table; the scheduler owns it.

    A sample has a row from `begin` to `end`. Its new tokens are collected here. They move to the
    sample's lists when these are read, when the weights get another version, or at its end.

    Attributes:
        generation: Generation of the sample's handle; -1 for a free row.
        start: Number of tokens of the prompt.
        seen: Number of tokens of prompt and answer that the host knows.
        length: Number of tokens of prompt and answer, including those that steps under way choose.
        limit: Largest number of tokens of prompt and answer together.
        on_device: Whether the device has chosen the last token, so that it need not be sent.
        searching: Whether the sample is a branch of a beam search.
        looking_back: Whether the choice of a token depends on the tokens before.
        slot: Slot of the sample's adapter; 0: none.
        top: Number of likeliest tokens to tell.
    """

    def __init__(self, count: int) -> None:
        self._samples: list[Sample | None] = [None] * count
        self.generation = np.full(count, -1)
        self.start, self.seen, self.length, self.limit = np.zeros((4, count), np.int64)
        self.on_device, self.searching, self.looking_back = np.zeros((3, count), np.bool_)
        self.slot, self.top = np.zeros((2, count), np.int64)
        self._own_version = np.zeros(count, np.int64)  # of the adapter
        self._streamed = np.zeros(count, np.bool_)
        # Parameters of sampling. `_forced` is the number of forced tokens.
        self._temperature, self._top_p = np.ones((2, count))
        self._min_p, self._adjusted = np.zeros(count), np.zeros(count, np.bool_)
        self._top_k, self._seed, self._index, self._forced = np.zeros((4, count), np.int64)
        # New tokens of each row, their number, and the version of the weights that chose them.
        self._tokens = np.zeros((count, 1), np.int32)
        self._logprobs = np.zeros((count, 1), np.float32)
        self._new, self._version = np.zeros((2, count), np.int64)
        # How many samples each token ends, up to the largest such token. The last entry is 0.
        self._ending = np.zeros(1, np.int64)

    def begin(self, sample: Sample) -> None:
        """Start a sample in the row of its handle."""
        assert sample.handle is not None
        row, params = sample.row, sample.params
        self._samples[row], self.generation[row] = sample, sample.handle.generation
        self.start[row] = len(sample.prompt)
        self.seen[row] = self.length[row] = sample.length
        self.limit[row] = len(sample.prompt) + params.max_tokens
        self.on_device[row], self.searching[row] = False, sample.beams is not None
        self._streamed[row] = sample.stream
        self.note_adapter(sample)
        self._temperature[row], self._top_k[row] = params.temperature, params.top_k
        self._top_p[row], self._seed[row] = params.top_p, sample.seed
        self._index[row], self._forced[row] = sample.index, len(params.forced)
        self._min_p[row], self._adjusted[row] = params.min_p, params.adjusted
        self.top[row] = params.top_logprobs
        counts = params.penalized or bool(params.bad_words)
        self.looking_back[row] = counts or sample.guide is not None
        self._count_ends(sample, 1)
        sample.rows = self

    def note_adapter(self, sample: Sample) -> None:
        """Let the next tokens of a sample be those of its adapter."""
        row, adapter = sample.row, sample.adapter
        self.slot[row] = 0 if adapter is None else adapter.slot
        self._own_version[row] = 0 if adapter is None else adapter.version

    def end(self, sample: Sample) -> None:
        """End a sample, which gets its new tokens, and free its row."""
        self.hand_over(sample)
        self._samples[sample.row], self.generation[sample.row] = None, -1
        self._count_ends(sample, -1)
        sample.rows = None

    def hand_over(self, sample: Sample) -> None:
        """Move the new tokens of a sample to its lists."""
        row = sample.row
        if count := int(self._new[row]):
            self._new[row] = 0
            sample.add_tokens(
                self._tokens[row, :count].tolist(),
                self._logprobs[row, :count].tolist(),
                int(self._version[row]),
            )

    def sample(self, row: int) -> Sample:
        """Return the sample of a row, which is not free."""
        sample = self._samples[row]
        assert sample is not None, "the row is free"
        return sample

    def launched(self, rows: Int64Array) -> None:
        """Count the tokens that a step chooses for `rows` on the device."""
        self.length[rows] += 1
        self.on_device[rows] = True

    def receive(
        self, rows: Int64Array, tokens: Int64Array, logprobs: NDArray[Any], version: int
    ) -> list[int]:
        """Add a token to each of `rows`, chosen by weights of `version`, or by their adapters.

        Returns:
            The indices in `rows` of all samples that end now, and perhaps of others.
        """
        versions = np.where(self.slot[rows] > 0, self._own_version[rows], version)
        other = (self._version[rows] != versions) & (self._new[rows] > 0)
        for row in rows[other].tolist():
            self.hand_over(self.sample(row))
        at = self._new[rows]
        if len(rows) and at.max() >= self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)], axis=1)
            self._logprobs = np.concatenate([self._logprobs, np.empty_like(self._logprobs)], axis=1)
        self._tokens[rows, at], self._logprobs[rows, at] = tokens, logprobs
        self._new[rows], self._version[rows] = at + 1, versions
        self.seen[rows] += 1
        ends = self._ending[np.minimum(tokens, len(self._ending) - 1)] > 0
        ends |= (self.seen[rows] == self.limit[rows]) | ~np.isfinite(logprobs)
        return np.flatnonzero(ends).tolist()

    def streamed(self, rows: Int64Array) -> list[Sample]:
        """Return the samples of `rows` whose tokens are told before their ends."""
        return [self.sample(row) for row in rows[self._streamed[rows]].tolist()]

    def temperatures(self, rows: Int64Array) -> NDArray[np.float64]:
        """Return the temperatures of `rows`; 0 is greedy."""
        return self._temperature[rows]

    def sampling(self, rows: Int64Array) -> dict[str, NDArray[Any]]:
        """Return the arguments of `SamplingBatch.build` for the next tokens of `rows`."""
        place = self.length[rows] - self.start[rows]
        forced = np.full(len(rows), -1)
        for i in np.flatnonzero(place < self._forced[rows]).tolist():
            forced[i] = self.sample(rows[i]).params.forced[place[i]]
        return {
            "temperature": self._temperature[rows],
            "top_k": self._top_k[rows],
            "top_p": self._top_p[rows],
            "counters": np.stack([self._seed[rows], self._index[rows], place], axis=1),
            "forced": forced,
            "min_p": self._min_p[rows],
            "adjusted": self._adjusted[rows],
        }

    def adjustments(self, rows: Int64Array) -> list[Adjustment]:
        """Return how the next logits are changed, of those of `rows` that are adjusted."""
        chosen = rows[self._adjusted[rows]]
        places = (self.length[chosen] - self.start[chosen]).tolist()
        samples = map(self.sample, chosen.tolist())
        return [adjustment_of(sample, at) for sample, at in zip(samples, places, strict=True)]

    def _count_ends(self, sample: Sample, change: int) -> None:
        more = max(sample.stop_ids, default=0) + 2 - len(self._ending)
        if more > 0:
            self._ending = np.pad(self._ending, (0, more))
        self._ending[list(sample.stop_ids)] += change
