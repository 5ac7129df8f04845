"""The experts of Qwen3-30B-A3B (128, top 8, 2048 x 768, bf16) from 16 to 16,384 tokens, beside the
time that their bytes and their operations take, and vLLM's `fused_experts` where it can be
imported, and what one of two ranks takes that share them by inner channels (TP) or by expert (EP).
`make bench-moe`.

Tokens go to experts as a random router sends them. Times are the device's alone: what a CUDA graph
replays. Before each, the answer is compared with the reference's in fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memsaver.system.machine import Impl
from rollout.ops.experts import Routing, Share, mix_experts
from tests.benchmarks.common import Scale, device_us, make_scale, parser, report

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
BYTES_PER_US, FLOPS_PER_US = 3.35e6, 989e6  # an H100 SXM's data sheet: HBM3, dense bf16
TOLERANCE = 2**-5  # of the largest output: bf16 rounds products, factors and the sum
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Experts:
    """x [T, H], choices and weights [T, k], stacked weights. share: which of all they are."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    share: Share | None = None

    @property
    def floor_us(self) -> float:
        """The larger of what the experts touched take to be read, and the products to be made."""
        _, hidden, inner = self.down.shape
        each = 3 * hidden * inner
        read = len(self.ids.unique()) * each * self.down.itemsize / BYTES_PER_US
        return max(read, 2 * self.ids.numel() * each / FLOPS_PER_US)


def draw(scale: Scale, tokens: int) -> Experts:
    experts, top_k = scale.choose(128, 8), scale.choose(8, 2)
    hidden, inner = scale.choose(2048, 48), scale.choose(768, 32)
    generator = torch.Generator(scale.device).manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=scale.device)
        return made.normal_(generator=generator)

    ids, weights = Routing(top_k=top_k, normalise=True).choose(normal(tokens, experts))
    gate_up = normal(experts, 2 * inner, hidden).mul_(hidden**-0.5)
    down = normal(experts, hidden, inner).mul_(inner**-0.5)
    return Experts(normal(tokens, hidden), ids, weights.bfloat16(), gate_up, down)


def mix(case: Experts, impl: Impl) -> Tensor:
    tensors = case.x, case.ids, case.weights, case.gate_up, case.down
    return mix_experts(*tensors, impl=impl, share=case.share)


def kernels(case: Experts) -> Run:
    return lambda: mix(case, "triton")


def first_rank(case: Experts) -> dict[str, Experts]:
    """What the first of two ranks computes, either way to share."""
    experts, _, inner = case.down.shape
    gate_up = case.gate_up.unflatten(1, (2, inner))[:, :, : inner // 2].flatten(1, 2).contiguous()
    down = case.down[:, :, : inner // 2].contiguous()
    few = replace(case, gate_up=case.gate_up[: experts // 2], down=case.down[: experts // 2])
    return {
        "a rank of TP 2": replace(case, gate_up=gate_up, down=down),
        "a rank of EP 2": replace(few, share=Share(0, experts)),
    }


def rivals() -> dict[str, Callable[[Experts], Run]]:
    """vLLM's, with the blocks that it takes on this device by itself."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError as error:
        print(f"no vLLM here: {error}")
        return {}

    def vllm(case: Experts) -> Run:
        ids, weights = case.ids.int(), case.weights.float()
        return lambda: fused_experts(case.x, case.gate_up, case.down, weights, ids)

    return {"vLLM": vllm}


def check(case: Experts, run: Run) -> float:
    """The largest difference from the reference in fp32, in parts of the largest output."""
    count = min(64, len(case.x))
    few = replace(
        case, x=case.x[:count].float(), ids=case.ids[:count], weights=case.weights[:count].float()
    )
    exact = mix(replace(few, gate_up=case.gate_up.float(), down=case.down.float()), "torch")
    apart = float((run()[:count] - exact).abs().max() / exact.abs().max())
    assert apart <= TOLERANCE, f"{apart} of the largest output apart"
    return apart


def main(arguments: list[str] | None = None) -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="*", help="instead of 16 to 16,384")
    args = options.parse_args(arguments)
    scale = make_scale(args)
    makers = rivals() if scale.on_gpu else {}
    found: dict[str, Any] = {}
    rows = []
    for tokens in args.tokens or (TOKENS if not scale.tiny else (3, 20)):
        case = draw(scale, tokens)
        cases = {"memsaver": case} | first_rank(case)
        runs = {name: kernels(each) for name, each in cases.items()}
        runs |= {name: make(case) for name, make in makers.items()}
        apart = {name: check(cases.get(name, case), run) for name, run in runs.items()}
        us = {name: device_us(scale, run, 10) for name, run in runs.items()}
        share = 100 * case.floor_us / us["memsaver"]
        found[str(tokens)] = {"floor us": case.floor_us, "us": us, "apart": apart}
        rows.append([tokens, case.floor_us, *us.values(), share])
        print(f"{tokens} tokens: {us}", flush=True)  # a run that is cut off has said something
    head = ["tokens", "floor, us", *(f"{name}, us" for name in us), "% of the floor's rate"]
    report("bench_moe", head, rows, {"tokens": found}, args.out)


if __name__ == "__main__":
    main()
