"""AdamW whose state is allocated in one block on a tag or streamed from host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memsaver import MemorySaver
from memsaver.ops.layout import round_up
from trainer_bridge.config import Schedule, TrainerConfig
from trainer_bridge.fsdp_internals import host_shard
from trainer_bridge.learning.adamw_8bit import AdamW8bit, kernel_options
from trainer_bridge.models.runtime import Runtime, side_by_side
from trainer_bridge.models.sharded_model import trained_params
from trainer_bridge.sync.shards import like_shard, local_shard

CHUNK = 32 << 20  # elements; copies of this size run at the link's rate, with little overhead
_SLOTS = 3  # chunks on the device: one arrives, one is updated, one leaves
_ALIGN = 64  # elements; vectorized kernels then split chunks as they would a whole tensor
_ROWS = ("master", "exp_avg", "exp_avg_sq")


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW on the shards themselves.

    DTensor's dispatch of a list of parameters takes the host longer than the update of a small
    model takes a GPU.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one update. Parameters without a gradient do not change."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                states = [self.state[param] for param in params]
                steps = [state["step"] for state in states]
                torch._foreach_add_(steps, 1)
                torch._fused_adamw_(
                    _shards(params),
                    _shards(param.grad for param in params),
                    _shards(state["exp_avg"] for state in states),
                    _shards(state["exp_avg_sq"] for state in states),
                    [],
                    steps,
                    amsgrad=False,
                    maximize=False,
                    **kernel_options(group),
                )


def _shards(tensors: Iterable[Any]) -> list[Tensor]:
    return [*map(local_shard, tensors)]


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
        self, groups: list[dict[str, Any]], options: Mapping[str, Any], runtime: Runtime
    ) -> None:
        """Allocate masters and moments, all zero: fill the masters, then call `publish`.

        The parameters of `groups` are DTensors of any dtype whose shards keep their addresses;
        their values are not read. `options` has the learning rate, the betas and eps; each group
        has its weight decay. A HostMemoryError says how much host memory is missing.
        """
        super().__init__(groups, dict(options))
        self.whole = True
        self._params = params = list(chain.from_iterable(group["params"] for group in groups))
        self._numbers = {param: number for number, param in enumerate(params)}
        self._weights = [local_shard(param).view(-1) for param in params]
        sizes = [weight.numel() for weight in self._weights]
        *starts, end = accumulate((round_up(size, _ALIGN) for size in sizes), initial=0)
        total = max(_ALIGN, end)  # with many ranks, a rank may have no element
        self._chunk = min(CHUNK, total)
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
        after = self._step + 1
        groups = [(self._grads(g["params"]), kernel_options(g)) for g in self.param_groups]

        def work(slot: Tensor, all_pieces: Sequence[_Slice]) -> None:
            for grads, options in groups:
                pieces = [piece for piece in all_pieces if piece.param in grads]
                if not pieces:
                    continue
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

    def _grads(self, params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """Return the flat gradient shards of `params` by number of the parameter."""
        return {
            self._numbers[param]: local_shard(param.grad).view(-1)
            for param in params
            if param.grad is not None
        }

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
                # Three streams work on three slots. Each waits for the event of the stream before
                # it, so a slot is filled again only when its last chunk has left.
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
class LearningRate:
    """The learning rate of every update.

    With learning rate L and W updates of warm-up, update u + 1 has L (u + 1) / (W + 1) while u < W,
    so no update has rate 0, and u = W is the first with the whole rate. Then the rate falls from
    `rate` at u = `start` to F = L * final_rate at u = `schedule.updates`. It is
    q rate + (1 - q) F, where with p = (u - start) / (updates - start)

        linear: q = 1 - p
        cosine: q = (1 + cos(pi p)) / 2

    Source of the cosine: Loshchilov and Hutter, "SGDR" (2017), without restarts. TRL and verl have
    the same forms, but begin the warm-up with an update of rate 0. Without that update, and with
    one more in warm-up and run, their rates are these.
    """

    learning_rate: float  # as configured
    schedule: Schedule
    rate: float  # from which the rate falls
    start: int  # updates before the fall

    @classmethod
    def of(cls, config: TrainerConfig) -> LearningRate:
        rate, schedule = config.learning_rate, config.schedule
        return cls(learning_rate=rate, schedule=schedule, rate=rate, start=schedule.warmup_updates)

    def after(self, updates: int) -> float:
        """Return the learning rate after `updates` optimizer steps."""
        warmup, kind, end = self.schedule.warmup_updates, self.schedule.kind, self.schedule.updates
        if updates < warmup:
            return self.learning_rate * (updates + 1) / (warmup + 1)
        if kind == "constant" or end is None:
            return self.rate
        # Before `start`, which a second resume at one seam asks for, the rate is `rate`.
        progress = min(1.0, max(0, updates - self.start) / max(1, end - self.start))
        left = 1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        final = self.learning_rate * self.schedule.final_rate
        return self.rate * left + final * (1 - left)  # exact at both ends

    def continuing(self, stored: Mapping[str, Any] | None, done: int) -> LearningRate:
        """Return the learning rate of a run that continues from a checkpoint after `done` updates.

        The stored learning rate continues if the run's configuration is the same. If only the
        number of updates differs, the rate of the last update falls to the new end, because a new
        end must never raise the rate. If anything else differs, or the warm-up is not complete,
        this learning rate applies.

        Args:
            stored: Fields of the checkpoint's learning rate; None if it has none.
            done: Updates before the checkpoint.
        """
        if stored is None or done <= self.schedule.warmup_updates:
            return self
        same_end = {**stored["schedule"], "updates": self.schedule.updates}
        if (stored["learning_rate"], same_end) != (self.learning_rate, asdict(self.schedule)):
            return self
        before = LearningRate(**{**stored, "schedule": Schedule(**stored["schedule"])})
        if before.schedule == self.schedule:
            return before
        return replace(self, rate=before.after(done - 1), start=done)


def after_load(optimizer: torch.optim.Optimizer, done: int) -> None:
    """Set the counters to `done` steps after a load, and round loaded masters into parameters."""
    for state in optimizer.state.values():
        state["step"].fill_(done)
    if isinstance(optimizer, StreamedAdamW):
        optimizer.publish()
    if isinstance(optimizer, AdamW8bit):
        optimizer.whole = True


def decay_groups(params: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Divide parameters into matrices with weight decay, and norms and biases without.

    Norms and biases have one dimension. Decay would pull the scale of a norm, whose neutral value
    is 1, to 0. TRL (transformers' trainer) leaves them out, too; verl with FSDP decays all.
    """
    parts = (
        ([p for p in params if p.ndim > 1], weight_decay),
        ([p for p in params if p.ndim < 2], 0.0),
    )
    return [{"params": part, "weight_decay": decay} for part, decay in parts if part]


def build_optimizer(
    module: nn.Module, config: TrainerConfig, runtime: Runtime, saver: MemorySaver, tag: str
) -> torch.optim.Optimizer:
    """Build AdamW of a module's trained parameters, with zero moments on a tag.

    `config.optimizer` and `optimizer_offload` choose the kind.

    Step counters (4 bytes per parameter tensor) stay in torch's own memory. The step is fused,
    because the unfused step on a GPU needs temporaries as large as the parameters.
    """
    params = list(trained_params(module).values())
    groups = decay_groups(params, config.weight_decay)
    options = dict[str, Any](lr=config.learning_rate, betas=config.betas, eps=config.adam_eps)
    if config.optimizer_offload:
        return StreamedAdamW(groups, options, runtime)
    if config.optimizer == "adamw_8bit":
        return AdamW8bit(groups, options, runtime, saver, tag)
    optimizer = ShardedAdamW(groups, **options, fused=True)
    specs = [(tuple(local_shard(param).shape), param.dtype) for param in params]
    pairs = zip(specs, specs, strict=True)
    moments = side_by_side(list(chain.from_iterable(pairs)), saver, tag)
    for param, first, second in zip(params, moments[0::2], moments[1::2], strict=True):
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=runtime.device),
            "exp_avg": like_shard(first.zero_(), param),
            "exp_avg_sq": like_shard(second.zero_(), param),
        }
    return optimizer
