"""AdamW whose state is made at once, side by side on a tag, or streamed from host memory."""

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
from trainer_bridge.training.device import Runtime, side_by_side

CHUNK = 32 << 20  # elements: copies this long run at the link's rate, and the ends cost little
_SLOTS = 3  # chunks on the device: one comes, one is updated, one goes
_ALIGN = 64  # elements: vectors of a kernel then end where they would in a whole tensor
_ROWS = ("master", "exp_avg", "exp_avg_sq")


class _Slice(NamedTuple):
    """A part of a shard in a chunk: of which parameter, and where it lies in both."""

    param: int
    in_shard: slice
    in_chunk: slice


class StreamedAdamW(torch.optim.Optimizer):
    """Updates fp32 masters on the host, and parameters that are the masters rounded.

    Masters and both moments are 12 bytes a parameter of host memory, pinned for a GPU. A step
    brings them to the device chunk by chunk, and back: while one chunk is updated the next comes
    and the one before goes, so that both directions of the link are busy. `state[param]` has step,
    master, exp_avg and exp_avg_sq, the last three as fp32 shards on the host, of the parameter's
    shape. The numbers are those of torch's fused AdamW over the masters; gradients are fp32.

    whole: False while a step writes, and for good where it was interrupted: what is there then is
    of two steps, and only `publish`, after all of it was loaded anew, makes it whole.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        config: TrainerConfig,
        runtime: Runtime,
        chunk: int | None = None,
    ) -> None:
        """params: of any dtype, DTensors whose shards keep their addresses; their values are not
        looked at. chunk: elements that pass at once, a multiple of 64.

        Masters and moments are 0: fill the masters, then `publish`. A HostMemoryError says how much
        host memory is missing.
        """
        defaults = {"lr": config.learning_rate, "betas": config.betas}
        super().__init__(
            params, defaults | {"eps": config.adam_eps, "weight_decay": config.weight_decay}
        )
        self.whole = True
        self._params = list(params)
        self._weights = [local_shard(param).view(-1) for param in params]
        ends = accumulate((round_up(each.numel(), _ALIGN) for each in self._weights), initial=0)
        *starts, end = ends
        total = max(_ALIGN, end)  # a rank of many may have no element
        self._chunk = min(chunk or CHUNK, total)
        self._chunks = _cut([each.numel() for each in self._weights], starts, self._chunk)
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
        """Return this rank's shards of the masters, on the host; writing to them writes them."""
        return {param: local_shard(self.state[param]["master"]) for param in self._params}

    @torch.no_grad()
    def publish(self) -> None:
        """Make the parameters what the masters are, rounded."""
        self._pass(self._round, inward=1, outward=0)
        self.whole = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update; parameters without a gradient stay. Host memory has all of it then."""
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
            weights = [self._weights[each.param][each.in_shard] for each in pieces]
            torch._foreach_copy_(weights, _parts(slot[0], pieces))

    def _pass(
        self, work: Callable[[Tensor, Sequence[_Slice]], None], inward: int, outward: int
    ) -> None:
        """Have `work` called with every chunk, fp32 [3, chunk] on the device, and its pieces.

        inward, outward: so many rows are copied to the device before it, and back after it. All is
        over when it returns; `whole` is False from its first write on.
        """
        side: Any = getattr(torch, self._device.type)  # torch.cpu has streams that do nothing
        here, coming, going = side.current_stream(), side.Stream(), side.Stream()
        count = min(_SLOTS, len(self._chunks))
        size = (count, len(_ROWS), self._chunk)
        slots = torch.empty(size, dtype=torch.float32, device=self._device)
        gone = [here.record_event()] * count  # the memory may be in use there until now
        self.whole = False
        try:
            for number, pieces in enumerate(self._chunks):
                place = number % count
                host = self._host[:, number * self._chunk : (number + 1) * self._chunk]
                slot = slots[place, :, : host.shape[1]]
                coming.wait_event(gone[place])
                with side.stream(coming):
                    _copy(slot[:inward], host[:inward])
                here.wait_event(coming.record_event())
                work(slot, pieces)
                going.wait_event(here.record_event())
                with side.stream(going):
                    _copy(host[:outward], slot[:outward])
                gone[place] = going.record_event()
        finally:
            side.synchronize()  # before the slots are freed, and the host reads


def _cut(sizes: Sequence[int], starts: Sequence[int], chunk: int) -> list[list[_Slice]]:
    """Return the pieces of every chunk: tensors of these sizes begin at `starts`, in order."""
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
    return [row[each.in_chunk] for each in pieces]


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy row by row: each is contiguous, and one copy for the engine."""
    for to, what in zip(target.unbind(), source.unbind(), strict=True):
        to.copy_(what, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate: `rate` after `start` updates, falling linearly to 0 after `end`; without an
    end it stays. learning_rate: what it began with.
    """

    learning_rate: float
    rate: float
    start: int = 0
    end: int | None = None

    @classmethod
    def of(cls, config: TrainerConfig) -> Schedule:
        rate = config.learning_rate
        return cls(learning_rate=rate, rate=rate, end=config.decay_steps)

    def after(self, updates: int) -> float:
        """Return the learning rate of the update that follows `updates` others."""
        if self.end is None:
            return self.rate
        return self.rate * max(0.0, 1 - (updates - self.start) / max(1, self.end - self.start))

    def continuing(self, stored: Mapping[str, Any] | None, done: int) -> Schedule:
        """Return the schedule of a run that goes on after `done` updates by the stored one.

        It is the stored one. With another end the rate falls from that of the last update, as what
        is left of a decay must not raise it; with another learning rate this schedule stays.
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
    """Make one clipped step, the one after `done` others, with this learning rate; return the
    gradients' norm before clipping.

    A norm that is not finite raises a FloatingPointError, and the parameters are unchanged.
    Gradients are dropped.
    """
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the gradient's norm is {grad_norm} in step {done + 1}, parameters are unchanged; "
            "look for NaN in what the batch holds beside its tokens, or lower the learning rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def after_load(optimizer: torch.optim.Optimizer, done: int) -> None:
    """Make what a loaded state has not: the moments' step counters, and parameters of masters."""
    for state in optimizer.state.values():
        state["step"].fill_(done)
    if isinstance(optimizer, StreamedAdamW):
        optimizer.publish()


def build_optimizer(
    params: Sequence[nn.Parameter],
    config: TrainerConfig,
    runtime: Runtime,
    saver: MemorySaver,
    tag: str = OPTIM,
) -> torch.optim.Optimizer:
    """Make AdamW with both moments zero. The step counters (4 bytes a parameter) stay in torch's
    own memory. With `config.optimizer_offload` nothing is on the tag (`StreamedAdamW`).

    Fused: the unfused step on a GPU needs temporaries as large as the parameters.
    """
    if config.optimizer_offload:
        return StreamedAdamW(params, config, runtime)
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
