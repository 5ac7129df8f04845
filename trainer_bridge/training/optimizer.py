"""AdamW whose state is allocated in one block on a tag or streamed from host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memsaver import MemorySaver
from memsaver.ops.layout import round_up
from trainer_bridge.config import TrainerConfig
from trainer_bridge.sync.shards import host_shard, like_shard, local_shard
from trainer_bridge.tags import OPTIM
from trainer_bridge.training.adamw_8bit import AdamW8bit
from trainer_bridge.training.device import Runtime, side_by_side

CHUNK = 32 << 20  # elements; copies of this size run at the link's rate, with little overhead
_SLOTS = 3  # chunks on the device: one arrives, one is updated, one leaves
_ALIGN = 64  # elements; vectorized kernels then split chunks as they would a whole tensor
_ROWS = ("master", "exp_avg", "exp_avg_sq")


class _Slice(NamedTuple):
    """A part of parameter number `param`'s shard, and its range in a chunk."""

    param: int
    in_shard: slice
    in_chunk: slice


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW with fp32 masters and moments in host memory; parameters are the rounded masters.

    Masters and both moments take 12 bytes of host memory per parameter, pinned for a GPU. A step
    streams them through the device chunk by chunk. While one chunk is updated, the next arrives and
    the previous one leaves, which uses both directions of the link. `state[param]` has step,
    master, exp_avg and exp_avg_sq, the last three as fp32 shards on the host in the parameter's
    shape. Results equal those of torch's fused AdamW on the masters. Gradients are fp32.

    Attributes:
        whole: Whether masters, moments and parameters belong to the same step. It is False while a
            step writes them, and stays False if the step is interrupted. Then load all masters and
            moments, and call `publish`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        config: TrainerConfig,
        runtime: Runtime,
        chunk: int | None = None,
    ) -> None:
        """Allocate masters and moments, all zero: fill the masters, then call `publish`.

        `params` are DTensors of any dtype whose shards keep their addresses; their values are not
        read. `chunk` counts elements, a multiple of 64; None takes `CHUNK`. A HostMemoryError says
        how much host memory is missing.
        """
        defaults = {"lr": config.learning_rate, "betas": config.betas}
        super().__init__(
            params, defaults | {"eps": config.adam_eps, "weight_decay": config.weight_decay}
        )
        self.whole = True
        self._params = list(params)
        self._weights = [local_shard(param).view(-1) for param in params]
        sizes = [weight.numel() for weight in self._weights]
        *starts, end = accumulate((round_up(size, _ALIGN) for size in sizes), initial=0)
        total = max(_ALIGN, end)  # with many ranks, a rank may have no element
        self._chunk = min(chunk or CHUNK, total)
        self._chunks = _cut(sizes, starts, self._chunk)
        state = runtime.host_memory(len(_ROWS) * total * torch.float32.itemsize)
        self._host = state.view(torch.float32).view(len(_ROWS), total)
        self._device = runtime.device
        self._step = torch.zeros((), dtype=torch.float32, device=runtime.device)
        for param, start in zip(params, starts, strict=True):
            shape = local_shard(param).shape
            rows = self._host[:, start : start + shape.numel()].unbind()
            shards = (host_shard(row.view(shape), param) for row in rows)
            self.state[param] = {"step": self._step, **dict(zip(_ROWS, shards, strict=True))}

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's shards of the masters, on the host, which the caller may write."""
        return {param: local_shard(self.state[param]["master"]) for param in self._params}

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters."""
        self._pass(self._round, inward=1, outward=0)
        self.whole = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one update, and wait until host memory is written.

        Parameters without a gradient do not change.
        """
        (group,) = self.param_groups
        grads = {
            number: local_shard(param.grad).view(-1)
            for number, param in enumerate(self._params)
            if param.grad is not None
        }
        after, (beta1, beta2) = self._step + 1, group["betas"]
        names = ("lr", "weight_decay", "eps")
        options = {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2}

        def work(slot: Tensor, pieces: Sequence[_Slice]) -> None:
            pieces = [piece for piece in pieces if piece.param in grads]
            if not pieces:
                return
            torch._fused_adamw_(
                _parts(slot[0], pieces),
                [grads[piece.param][piece.in_shard] for piece in pieces],
                _parts(slot[1], pieces),
                _parts(slot[2], pieces),
                [],
                [after] * len(pieces),
                amsgrad=False,
                maximize=False,
                **options,
            )
            self._round(slot, pieces)

        self._pass(work, inward=len(_ROWS), outward=len(_ROWS))
        self._step.copy_(after)
        self.whole = True

    def _round(self, slot: Tensor, pieces: Sequence[_Slice]) -> None:
        if pieces:
            weights = [self._weights[piece.param][piece.in_shard] for piece in pieces]
            torch._foreach_copy_(weights, _parts(slot[0], pieces))

    def _pass(
        self, work: Callable[[Tensor, Sequence[_Slice]], None], inward: int, outward: int
    ) -> None:
        """Stream all chunks through the device, and wait, leaving `whole` False.

        `work` gets every chunk, fp32 [3, chunk] on the device, and its pieces. Before it, `inward`
        rows of the chunk are copied to the device; after it, `outward` rows are copied back.
        """
        backend: Any = getattr(torch, self._device.type)  # streams of torch.cpu do nothing
        compute, inbound, outbound = backend.current_stream(), backend.Stream(), backend.Stream()
        count = min(_SLOTS, len(self._chunks))
        size = (count, len(_ROWS), self._chunk)
        slots = torch.empty(size, dtype=torch.float32, device=self._device)
        freed = [compute.record_event()] * count  # queued kernels may still use the slots' memory
        self.whole = False
        try:
            for number, pieces in enumerate(self._chunks):
                place = number % count
                host = self._host[:, number * self._chunk : (number + 1) * self._chunk]
                slot = slots[place, :, : host.shape[1]]
                inbound.wait_event(freed[place])
                with backend.stream(inbound):
                    _copy(slot[:inward], host[:inward])
                compute.wait_event(inbound.record_event())
                work(slot, pieces)
                outbound.wait_event(compute.record_event())
                with backend.stream(outbound):
                    _copy(host[:outward], slot[:outward])
                freed[place] = outbound.record_event()
        finally:
            backend.synchronize()  # the slots are freed next, and the host may read


def _cut(sizes: Sequence[int], starts: Sequence[int], chunk: int) -> list[list[_Slice]]:
    """Divide tensors into pieces, and return the pieces of every chunk of `chunk` elements.

    `starts` has the first element of each tensor in the concatenated chunks, ascending.
    """
    total = max((start + size for start, size in zip(starts, sizes, strict=True)), default=0)
    chunks: list[list[_Slice]] = [[] for _ in range(0, total, chunk)]
    for param, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        at = 0
        while at < size:
            number, first = divmod(start + at, chunk)
            length = min(size - at, chunk - first)
            piece = _Slice(param, slice(at, at + length), slice(first, first + length))
            chunks[number].append(piece)
            at += length
    return chunks


def _parts(row: Tensor, pieces: Sequence[_Slice]) -> list[Tensor]:
    return [row[piece.in_chunk] for piece in pieces]


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy row by row, because each contiguous row is a single operation of the copy engine."""
    for target_row, source_row in zip(target.unbind(), source.unbind(), strict=True):
        target_row.copy_(source_row, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that is constant or falls linearly."""

    learning_rate: float  # as configured
    rate: float  # after `start` updates
    start: int = 0  # updates before the decay begins
    end: int | None = None  # updates after which the rate is 0; None keeps it constant

    @classmethod
    def of(cls, config: TrainerConfig) -> Schedule:
        rate = config.learning_rate
        return cls(learning_rate=rate, rate=rate, end=config.decay_steps)

    def after(self, updates: int) -> float:
        """Return the learning rate after `updates` optimizer steps."""
        if self.end is None:
            return self.rate
        return self.rate * max(0.0, 1 - (updates - self.start) / max(1, self.end - self.start))

    def continuing(self, stored: Mapping[str, Any] | None, done: int) -> Schedule:
        """Return the schedule of a run that continues from a checkpoint after `done` updates.

        It is the stored schedule. If the end differs, the rate falls from that of the last update,
        because a new end must never raise it. If the learning rate differs, or if one of the two
        schedules is constant, this schedule applies. `stored` has the fields of the checkpoint's
        schedule; None if it has none.
        """
        if stored is None or not done:
            return self
        before = Schedule(**stored)
        if self.end is None or before.end is None or self.learning_rate != before.learning_rate:
            return self
        if self.end == before.end:
            return before
        return replace(self, rate=before.after(done - 1), start=done)


def optimizer_step(
    optimizer: torch.optim.Optimizer, config: TrainerConfig, rate: float, done: int
) -> float:
    """Clip the gradients, run step `done + 1` with learning rate `rate`, and free the gradients.

    The result is the norm of the gradients before clipping. If it is not finite, the call raises a
    FloatingPointError, and the parameters are unchanged.
    """
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the gradient's norm is {grad_norm} in step {done + 1}, parameters are unchanged; "
            "look for NaN in the batch's float fields, or lower the learning rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def after_load(optimizer: torch.optim.Optimizer, done: int) -> None:
    """Restore the step counters after a load, and round loaded masters into the parameters."""
    for state in optimizer.state.values():
        state["step"].fill_(done)
    if isinstance(optimizer, StreamedAdamW):
        optimizer.publish()
    if isinstance(optimizer, AdamW8bit):
        optimizer.whole = True


def build_optimizer(
    params: Sequence[nn.Parameter],
    config: TrainerConfig,
    runtime: Runtime,
    saver: MemorySaver,
    tag: str = OPTIM,
) -> torch.optim.Optimizer:
    """Build AdamW with zero moments on a tag, as `config.optimizer` and `optimizer_offload` say.

    Step counters (4 bytes per parameter tensor) stay in torch's own memory. The step is fused,
    because the unfused step on a GPU needs temporaries as large as the parameters.
    """
    if config.optimizer_offload:
        return StreamedAdamW(params, config, runtime)
    if config.optimizer == "adamw_8bit":
        return AdamW8bit(params, config, runtime, saver, tag)
    device = runtime.device
    optimizer = torch.optim.AdamW(
        params,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    specs = [(tuple(local_shard(param).shape), param.dtype) for param in params]
    pairs = zip(specs, specs, strict=True)
    moments = side_by_side(list(chain.from_iterable(pairs)), saver, tag)
    for param, first, second in zip(params, moments[0::2], moments[1::2], strict=True):
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": like_shard(first.zero_(), param),
            "exp_avg_sq": like_shard(second.zero_(), param),
        }
    return optimizer
