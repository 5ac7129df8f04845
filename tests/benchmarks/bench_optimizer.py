"""An update whose masters and moments pass through the device, against the time that its bytes take
both ways at once, and against loading all, updating, and storing all.

`make bench-optimizer`: 2 Gi parameters, 24 GiB of pinned host memory, which is most of the minute
that it takes. Both ways are to leave the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from tests.benchmarks import common
from tests.benchmarks.common import GIB, Figure, Figures, Scale, figures
from tests.helpers.trainer_bridge.states import one_rank
from trainer_bridge import TrainerConfig
from trainer_bridge.sync.shards import like_shard, local_shard
from trainer_bridge.training import Runtime
from trainer_bridge.training.optimizer import StreamedAdamW

ROWS = ("master", "exp_avg", "exp_avg_sq")
REPEATS, WARMUP = 5, 2
CONFIG = TrainerConfig(model_path="none", learning_rate=1e-3, weight_decay=0.1)
Held = list[Mapping[str, Tensor]]
"""Of each parameter, its rows on the host."""


def update(scale: Scale) -> Figures:
    runtime = Runtime.open(str(scale.device))
    try:
        params = _params(scale, runtime)
        optimizer = StreamedAdamW(params, CONFIG, runtime, scale.choose(0, 128) or None)
        held = [{row: local_shard(optimizer.state[param][row]) for row in ROWS} for param in params]
        nbytes = sum(row.nbytes for rows in held for row in rows.values())
        floor = _floor(held, scale)
        streamed, found = _run(optimizer, params, held, optimizer.step)
        optimizer.state[params[0]]["step"].zero_()
        serial, expected = _run(optimizer, params, held, _Serial(optimizer, params, held))
    finally:
        runtime.close()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    times = {"floor, both ways at once": floor, "streamed": streamed, "serial": serial}
    return [
        *figures(times),
        *figures({"each way": nbytes / GIB}, "GiB"),
        *figures({"floor": nbytes / GIB / (floor / 1e3)}, "GiB/s each way"),
        Figure(what="streamed", value=streamed / floor, unit="x floor", target="at most 1.2"),
        Figure(what="serial", value=serial / floor, unit="x floor"),
    ]


def _params(scale: Scale, runtime: Runtime) -> list[nn.Parameter]:
    """A layer's matrices and norms, many times; bf16, with fp32 gradients."""
    sizes = [scale.choose(128 << 20, 300), 3584] * scale.choose(16, 3)
    params = one_rank(
        [torch.zeros(size, device=scale.device, dtype=torch.bfloat16) for size in sizes],
        runtime.mesh,
        torch.bfloat16,
    )
    draw = torch.Generator(scale.device).manual_seed(1)
    for param in params:
        grad = torch.randn(param.shape, generator=draw, device=scale.device)
        param.grad = like_shard(grad, param)
    return params


def _floor(held: Held, scale: Scale) -> float:
    """Milliseconds of a third of the bytes in and out at once, times 3: few large copies between
    the optimizer's own pinned memory and the device.
    """
    size = sum(rows["master"].numel() for rows in held)
    come, go = (torch.zeros(size, device=scale.device) for _ in "io")
    parts = [rows["master"].numel() for rows in held]
    inward = torch.cuda.Stream() if scale.on_gpu else None

    def both() -> None:
        for part, rows in zip(go.split(parts), held, strict=True):
            rows["exp_avg_sq"].copy_(part, non_blocking=True)
        with torch.cuda.stream(inward):
            for part, rows in zip(come.split(parts), held, strict=True):
                part.copy_(rows["exp_avg"], non_blocking=True)

    return len(ROWS) * common.median_ms(both, REPEATS, WARMUP, scale.device)


def _run(
    optimizer: StreamedAdamW, params: list[nn.Parameter], held: Held, step: common.Run
) -> tuple[float, list[Tensor]]:
    """Milliseconds of a step from the same state on; what all of them make of the weights, and of
    one parameter's masters and moments.
    """
    draw = torch.Generator().manual_seed(2)
    for rows in held:
        block = torch.randn(min(1 << 20, rows["master"].numel()), generator=draw)
        for part in rows["master"].split(len(block)):
            part.copy_(block[: len(part)])
        rows["exp_avg"].zero_()
        rows["exp_avg_sq"].zero_()
    optimizer.publish()
    took = common.median_ms(step, REPEATS, WARMUP)
    return took, [local_shard(each).clone() for each in params] + [
        row.clone() for row in held[0].values()
    ]


class _Serial:
    """All of it to the device, one fused update, all of it back."""

    def __init__(self, optimizer: StreamedAdamW, params: list[nn.Parameter], held: Held) -> None:
        self._weights, self._held = [local_shard(each) for each in params], held
        self._grads = [local_shard(each.grad) for each in params if each.grad is not None]
        self._step = optimizer.state[params[0]]["step"]
        self._there = {
            row: [torch.empty(each[row].shape, device=self._step.device) for each in held]
            for row in ROWS
        }

    @torch.no_grad()
    def __call__(self) -> None:
        there, group = self._there, CONFIG
        for row, tensors in there.items():
            for each, rows in zip(tensors, self._held, strict=True):
                each.copy_(rows[row], non_blocking=True)
        self._step += 1
        torch._fused_adamw_(
            there["master"],
            self._grads,
            there["exp_avg"],
            there["exp_avg_sq"],
            [],
            [self._step] * len(self._grads),
            lr=group.learning_rate,
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay,
            eps=group.adam_eps,
            amsgrad=False,
            maximize=False,
        )
        torch._foreach_copy_(self._weights, there["master"])
        for row, tensors in there.items():
            for each, rows in zip(tensors, self._held, strict=True):
                rows[row].copy_(each, non_blocking=True)
        common.settle()


def main(arguments: list[str] | None = None) -> None:
    args = common.parser(__doc__).parse_args(arguments)
    scale = common.make_scale(args)
    common.run_cases("bench_optimizer", {"update": partial(update, scale)}, args.out)


if __name__ == "__main__":
    main()
