"""A model of a trainer: its module, what updates it, and its passes over a batch on all ranks."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memsaver import MemorySaver
from trainer_bridge.config import TrainerConfig
from trainer_bridge.fsdp_internals import keep_unsharded, reshard, whole_pass
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch, check_tokens, dispatch, lay_out
from trainer_bridge.learning.loss_scale import TRIES, LossScale, check_scores
from trainer_bridge.learning.optimizer import LearningRate, after_load, build_optimizer
from trainer_bridge.learning.tokens import Tokens
from trainer_bridge.models.layer_graphs import LayerGraphs
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import build_model, trained_params
from trainer_bridge.sync.shards import local_shard
from trainer_bridge.tag_names import PARAMS

T = TypeVar("T")


@dataclass(frozen=True)
class TokenValues:
    """Values of the response tokens of a batch, from the micro batches of this rank."""

    _rows: list[int] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _parts: list[Tensor] = field(default_factory=list)

    def add(self, micro: MicroBatch, values: Tensor) -> None:
        """Add the values [N] of a micro batch; they replace earlier ones of its sequences."""
        self._rows.extend(micro.rows)
        self._counts.extend(micro.counts)
        self._parts.append(values)

    def gather(self, batch: SequenceBatch, runtime: Runtime) -> Tokens:
        """Return the value of each response token, 0 if it is not learned; a collective call."""
        learned = batch.tokens("response_ids")
        values = learned.with_values(np.zeros(len(learned.values)))
        numbers = runtime.numbers(torch.cat(self._parts)) if self._parts else values.values
        for row, count, end in zip(self._rows, self._counts, accumulate(self._counts), strict=True):
            if row >= 0:
                values.array(row)[:] = numbers[end - count : end]
        return batch.whole(values.with_values(runtime.sum_ranks(values.values)))


class Model:
    """A module, and what updates it; owned by a trainer, which has up to three.

    A subclass says what a score is. Scores and updates are collective calls: every rank passes the
    whole batch.

    Attributes:
        module: Module, sharded by FSDP2.
        config: Configuration of module and optimizer.
        optimizer: Optimizer of the trained parameters; None if the module is frozen.
        step: Number of updates that the parameters have had.
        rate: Learning rate over the updates.
        loss_scale: Scale of the loss, which float16 needs.
        graphs: CUDA graphs of its layers in updates; None without.
        scores: Computes fp32 scores [N] of the response tokens of a micro batch.
    """

    scores: Callable[[SequenceBatch, MicroBatch], Tensor]

    def __init__(
        self,
        module: nn.Module,
        config: TrainerConfig,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer | None = None,
        name: str = "",
    ) -> None:
        """Wrap a module; `name` is the model's in checkpoints."""
        self.module: Any = module
        self.optimizer: Any = optimizer
        self.config, self.step = config, 0
        self.rate, self.loss_scale = LearningRate.of(config), LossScale.of(config)
        self._runtime, self._name = runtime, name
        self.graphs: LayerGraphs | None = None

    @classmethod
    def build(
        cls,
        config: TrainerConfig,
        runtime: Runtime,
        saver: MemorySaver,
        tag: str,
        moments: str | None = None,
        **how: Any,
    ) -> Self:
        """Build a model on `tag`, with moments on tag `moments`, or frozen without such a tag.

        `how` are further arguments of `build_model`.
        """
        module, optimizer = build_model(config, runtime, saver, tag=tag, **how), None
        if moments is not None:
            optimizer = build_optimizer(module, config, runtime, saver, moments)
        model = cls(module, config, runtime, optimizer, "" if tag == PARAMS else tag)
        if config.cuda_graphs and optimizer is not None:
            model.graphs = LayerGraphs(module, config, runtime, saver, tag)
        return model

    def score(self, method: str, batch: SequenceBatch) -> Tokens:
        """Score every response token in eval mode; every rank gets all scores.

        The module is left sharded.

        Raises:
            ValueError: The model does not support the batch (`check_tokens`).
            FloatingPointError: A score is not finite; the text names `method`.
        """
        scores = self.any_scores(batch)
        check_scores(method, scores, self.config)
        return scores

    def any_scores(self, batch: SequenceBatch) -> Tokens:
        """Score as `score` does; the scores may not be finite."""
        check_tokens(batch, self.module.config)
        self.module.eval()
        self._runtime.use_graphs(None)

        def passes() -> TokenValues:
            values = TokenValues()
            with torch.no_grad(), whole_pass(self.module):
                for micro in self._micro_batches(batch):
                    values.add(micro, self.scores(batch, micro))
            return values

        # Read last, so that the host prepares a micro batch while the device scores the one before.
        return self._with_less(batch, passes).gather(batch, self._runtime)

    def add_gradients(
        self, batch: SequenceBatch, backward: Callable[[MicroBatch], list[Tensor]]
    ) -> list[float]:
        """Accumulate the gradients of a batch in training mode.

        `backward` adds the gradient of a micro batch, and returns fp32 sums over its tokens. The
        result has the sums over all micro batches of all ranks.
        """
        self.module.train()
        graphs = self.graphs

        def sums(micro: MicroBatch) -> Tensor:
            packing = micro.packing
            with graphs.layers_of(packing) if graphs and packing else nullcontext():
                return torch.stack(backward(micro))

        def passes() -> list[Tensor]:
            self._runtime.use_graphs(graphs)
            if graphs is not None:
                graphs.begin()
            with whole_pass(self.module):
                return [*map(sums, self._micro_batches(batch, alike=graphs is not None))]

        parts = self._with_less(batch, passes)
        # One transfer and one wait for the sums of all micro batches.
        total = torch.stack(parts).double().sum(0)
        return self._runtime.sum_ranks(self._runtime.numbers(total)).tolist()

    def _with_less(self, batch: SequenceBatch, passes: Callable[[], T]) -> T:
        """Run passes over a batch, which begin again if the device has no room for one.

        The micro batches are then half as large, also in later calls. Several ranks raise instead,
        because the others wait in their own passes.
        """
        try:
            return passes()
        except torch.OutOfMemoryError:
            limit, least = self._limit(batch), batch.max_length if self.module.packs else 1
            if self._runtime.world > 1 or limit <= least:
                raise
        half = max(least, limit // 2)
        key = "micro_batch_tokens" if self.module.packs else "micro_batch_size"
        changes: dict[str, Any] = {key: half}
        self.config = replace(self.config, **changes)
        warnings.warn(f"out of memory: {key}={half} from now on, not {limit}", stacklevel=2)
        self.free()
        self.forget_graphs()
        self._runtime.empty_cache()
        return passes()

    def _limit(self, batch: SequenceBatch) -> int:
        """Return the tokens of a micro batch, or its sequences, if the module pads them."""
        config, longest = self.config, batch.max_length
        if not self.module.packs:
            return config.micro_batch_size
        return max(longest, config.micro_batch_tokens or config.micro_batch_size * longest)

    def _micro_batches(self, batch: SequenceBatch, alike: bool = False) -> Iterator[MicroBatch]:
        """Yield this rank's share of a batch; the module may keep parameters until the last one.

        Micro batches that are `alike` have one of 16 numbers of tokens, whatever the batch.
        """
        module, runtime, limit = self.module, self._runtime, self._limit(batch)
        shares = dispatch(batch, runtime.rank, runtime.world, limit, packed=module.packs)
        for left, rows in zip(reversed(range(len(shares))), shares, strict=True):
            keep_unsharded(module, runtime.keep_unsharded, last=not left)
            yield lay_out(batch, rows, runtime.device, limit, packed=module.packs, alike=alike)

    def take_step(
        self, backward: Callable[[float], list[float]]
    ) -> tuple[list[float], dict[str, float]]:
        """Run an optimizer step on new gradients, and free them.

        `backward` adds the gradients of the loss times the given scale, and returns sums over all
        ranks, first the loss. It is repeated at half the scale while the gradients are not finite
        (`LossScale`). Then they are divided by the scale and clipped.

        Returns:
            The sums, and the figures grad_norm (before clipping) and learning_rate. A dynamic scale
            adds loss_scale (which gave finite gradients) and overflows (the number of repeats).

        Raises:
            FloatingPointError: The gradients are not finite, and a lower scale is no remedy
                (`LossScale.check_repeat`). Nothing has changed.
        """
        rate, scale = self.rate.after(self.step), self.loss_scale
        try:
            for overflows in range(TRIES):
                used = scale.value / 2**overflows
                self.zero_grad()  # a failed try must not hold memory
                sums = backward(used)
                self._runtime.average_replicas(map(local_shard, _gradients(self.optimizer)))
                norm = _clip(self.optimizer, used, self.config.max_grad_norm)
                if math.isfinite(norm):
                    break
                scale.check_repeat(norm, sums[0], overflows + 1, self.step + 1)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        finally:
            self.zero_grad()
        scale.keep(used)
        self.step += 1
        figures = {"grad_norm": norm, "learning_rate": rate}
        if scale.dynamic:
            figures |= {"loss_scale": used, "overflows": float(overflows)}
        return sums, figures

    def zero_grad(self) -> None:
        """Free the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def free(self) -> None:
        """Free gradients and unsharded layers."""
        self.zero_grad()
        reshard(self.module)
        if self.graphs is not None:
            self.graphs.free()

    def forget_graphs(self) -> None:
        """Forget graphs of micro batches that will not come again."""
        if self.graphs is not None:
            self.graphs.clear()

    @property
    def whole(self) -> bool:
        """Return whether parameters, masters and moments belong to the same step."""
        return getattr(self.optimizer, "whole", True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name, without a copy.

        They are the trained parameters, or their masters, and moments; of a frozen module, all
        parameters.
        """
        prefix = self._name and f"{self._name}."
        if self.optimizer is None:
            named = self.module.named_parameters()
            return {f"{prefix}{name}": param.detach() for name, param in named}
        tensors: dict[str, Tensor] = {}
        for name, param in trained_params(self.module).items():
            moments = self.optimizer.state[param]
            tensors[f"{prefix}params.{name}"] = moments.get("master", param.detach())
            for moment in [key for key in moments if key not in ("step", "master")]:
                tensors[f"{prefix}optim.{moment}.{name}"] = moments[moment]
        return tensors

    def values(self) -> dict[str, Any]:
        """Return the JSON values of a checkpoint by name."""
        prefix = self._name and f"{self._name}_"
        values: dict[str, Any] = {f"{prefix}step": self.step}
        if self.optimizer is not None:
            values[f"{prefix}rate"] = asdict(self.rate)
            values[f"{prefix}loss_scale"] = asdict(self.loss_scale)
        return values

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a checkpoint's values, after its tensors were loaded."""
        prefix = self._name and f"{self._name}_"
        self.step = values.get(f"{prefix}step", 0)
        if self.optimizer is None:
            return
        rate, scale = (values.get(f"{prefix}{name}") for name in ("rate", "loss_scale"))
        self.rate = LearningRate.of(self.config).continuing(rate, self.step)
        self.loss_scale = LossScale.of(self.config).continuing(scale)
        after_load(self.optimizer, self.step)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [param.grad for param in params if param.grad is not None]


def _clip(optimizer: torch.optim.Optimizer, scale: float, limit: float | None) -> float:
    """Divide the gradients by the scale, clip them, and return their norm on all ranks."""
    grads = _gradients(optimizer)
    shards = [*map(local_shard, grads)]
    if not grads:
        return 0.0
    if scale != 1:
        torch._foreach_mul_(shards, 1 / scale)
    mesh = getattr(grads[0], "device_mesh", None)
    if mesh is None or mesh.size() == 1:  # DTensor's dispatch would take time for nothing
        norm = torch.nn.utils.get_total_norm(shards)
    else:
        norm = torch.nn.utils.get_total_norm(grads).full_tensor()  # type: ignore[attr-defined]
    if limit is not None:
        torch._foreach_mul_(shards, (limit / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def token_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Compute the logits [N, V], in the model's dtype, that predict `micro`'s response tokens."""
    logits = model(**micro.inputs(), logits_to_keep=micro.kept).logits
    return logits[micro.row, micro.column]
