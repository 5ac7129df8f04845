"""The numbers that CUDA graphs read at fixed addresses, packed into one copy to the device."""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.allocators import Int64Array
from rollout.ops.torch_attention import BatchShape


class GraphInputs:
    """Inputs of graphs, int64 at a fixed address.

    Attributes:
        on_device: The inputs.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        # Two buffers, because the step before may still wait for the copy from its own.
        self._host = torch.zeros((2, count), dtype=torch.int64, pin_memory=True)
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self.on_device = torch.zeros(count, dtype=torch.int64, device=device)
        self._turn = 0

    def send(self, values: Int64Array) -> None:
        """Copy the numbers to the device, in the order of the current stream."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        copied.synchronize()
        host = self._host[self._turn, : len(values)]
        host.numpy()[:] = values
        self.on_device[: len(host)].copy_(host, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.on_device.device))


class DecodeInputs(NamedTuple):
    """Inputs of a decode step of B rows, which each step leaves as the next one needs them."""

    positions: Tensor  # int64 [B]: of the tokens to compute
    rows: Tensor  # int64 [B], of the request table
    counters: Tensor  # int64 [B, 3], see `SamplingBatch`
    temperature: Tensor  # fp32 [B, 1]
    greedy: Tensor  # bool [B]

    @staticmethod
    def words(size: int) -> int:
        """Return the numbers that `size` rows take, packed."""
        return 5 * size + -(-size // 2) + -(-size // 8)

    @classmethod
    def of(cls, packed: Tensor, size: int) -> Self:
        """Return views of packed inputs, int64 [words(size)]."""
        heat = 5 * size + -(-size // 2)
        return cls(
            packed[:size],
            packed[size : 2 * size],
            packed[2 * size : 5 * size].view(size, 3),
            packed[5 * size : heat].view(torch.float32)[:size].unsqueeze(1),
            packed[heat : cls.words(size)].view(torch.bool)[:size],
        )


def pack_decodes(
    positions: Int64Array,
    rows: Int64Array,
    counters: Int64Array,
    temperature: NDArray[np.float32],
    greedy: NDArray[np.bool_],
    size: int,
) -> Int64Array:
    """Pack the inputs of a decode step, padded to `size` rows by greedy ones of row 0.

    `temperature` and `greedy` are the result of `divisors`.
    """
    packed, count = np.zeros(DecodeInputs.words(size), dtype=np.int64), len(rows)
    inputs = DecodeInputs.of(torch.from_numpy(packed), size)
    heat, choice = inputs.temperature.numpy()[:, 0], inputs.greedy.numpy()
    packed[:count], packed[size : size + count] = positions, rows
    inputs.counters.numpy()[:count] = counters
    heat[:], choice[:] = 1.0, True
    heat[:count], choice[:count] = temperature, greedy
    return packed


def pack_prompts(
    ids: Int64Array, positions: Int64Array, shape: BatchShape, size: int, most: int
) -> Int64Array:
    """Pack a step of at most `size` tokens and `most` requests of either kind for a replay.

    Args:
        ids: Tokens of the prompts; those of decoding samples are on the device.
        positions: Position of every token, decoding samples first.
        shape: Shape of the step.
        size: Tokens of the graph.
        most: Decode requests of the graph, and prefill chunks.

    Returns:
        `tokens` [3, size], then `requests` [4, 2 * most], flattened. The first has the id of each
        token (-1: the row's last token), its position and its row; padding is token 0 of row 0. The
        second is `TritonPlan.meta`.
    """
    packed = np.zeros(3 * size + 8 * most, dtype=np.int64)
    tokens, requests = packed[: 3 * size].reshape(3, size), packed[3 * size :].reshape(4, -1)
    decoding, count = shape.num_decode, len(positions)
    tokens[0, :decoding] = -1
    tokens[0, decoding:count] = ids
    tokens[1, :count] = positions
    tokens[2, :count] = np.repeat(shape.rows, shape.q_lens)
    numbers = np.array([shape.rows, shape.q_lens, shape.kv_lens, shape.q_lens])
    numbers[1] = np.cumsum(numbers[3]) - numbers[3]
    requests[1, most:] = count  # of padding
    requests[:, :decoding] = numbers[:, :decoding]
    requests[:, most : most + numbers.shape[1] - decoding] = numbers[:, decoding:]
    return packed
