"""The experts of Qwen3-30B-A3B in training (128, top 8, 2048 x 768, bf16): the trainer's forward
and backward beside transformers' own `grouped_mm`, alone at 4,096 and 16,384 tokens and in a step
of layers under FSDP2. `make bench-moe-train`.

Both run on the same weights in one process; before they are timed their outputs and gradients are
compared. kernels: microseconds of the device, by kernel, in one forward and backward. The step has
16 sequences of 1,024 tokens in one micro batch, half of each an answer, bf16 masters, and a sixth
of the words, so that the head weighs beside 8 layers as it does beside 48.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from memsaver import MemorySaver
from tests.benchmarks.bench_replay import describe, in_turn
from tests.benchmarks.common import Scale, make_scale, parser, report, settle
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.training.moe import NAME, mix_experts

RUNS: dict[str, Callable[..., Tensor]] = {
    "transformers": grouped_mm_experts_forward,
    "memsaver": mix_experts,
}
TOLERANCE = 2**-5  # of the largest output or gradient: bf16 rounds at every step of the way
PEAK_FLOPS = 989e12  # an H100 SXM's data sheet: dense bf16


class Experts:
    """A layer's experts, tokens, and where a random router sends them."""

    def __init__(self, scale: Scale, config: Any, tokens: int) -> None:
        torch.manual_seed(tokens)
        with scale.device:
            self.module = Qwen3MoeExperts(config).bfloat16()
            for param in self.module.parameters():
                nn.init.normal_(param, std=param.shape[-1] ** -0.5)
            scores = torch.randn(tokens, config.num_experts).softmax(-1)
            weights, self.ids = scores.topk(config.num_experts_per_tok, dim=-1)
            x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16)
            self.slope = torch.randn_like(x)
        self.given = [x, (weights / weights.sum(-1, keepdim=True)).bfloat16()]
        for each in self.given:
            each.requires_grad_()
        products = self.ids.numel() * self.module.down_proj[0].numel() * 3
        self.floor_ms = 6 * products / PEAK_FLOPS * 1e3  # forward, and twice that backward

    def forward(self, run: Callable[..., Tensor]) -> Tensor:
        return run(self.module, self.given[0], self.ids, self.given[1])

    def both(self, run: Callable[..., Tensor]) -> list[Tensor]:
        """The output and all gradients."""
        out = self.forward(run)
        inputs = [*self.given, *self.module.parameters()]
        return [out.detach(), *torch.autograd.grad(out, inputs, self.slope)]

    def check(self) -> float:
        """The largest difference between both, in parts of the largest number."""
        pairs = zip(*(self.both(run) for run in RUNS.values()), strict=True)
        apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        assert apart <= TOLERANCE, f"{apart} of the largest number apart"
        return apart


def kernels(scale: Scale, run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of one run, by kernel, the longest first."""
    activity = ProfilerActivity.CUDA if scale.on_gpu else ProfilerActivity.CPU
    settle()
    with profile(activities=[activity]) as found:
        run()
        settle()
    kind = "self_device_time_total" if scale.on_gpu else "self_cpu_time_total"
    times = Counter[str]()
    for each in found.key_averages():
        times[each.key[:120]] += float(getattr(each, kind))  # several begin alike
    return dict(times.most_common(20))


def alone(scale: Scale, config: Any, tokens: int) -> tuple[list[list[object]], dict[str, Any]]:
    case = Experts(scale, config, tokens)
    apart, rows = case.check(), []
    for what, method in (("forward", case.forward), ("forward and backward", case.both)):
        ms = in_turn(scale, {name: partial(method, run) for name, run in RUNS.items()})
        floor = case.floor_ms / (3 if what == "forward" else 1)
        rows.append([f"{tokens} tokens, {what}", *ms.values(), floor])
        print(rows[-1], flush=True)
    seen = {name: kernels(scale, partial(case.both, run)) for name, run in RUNS.items()}
    for name, times in seen.items():
        print(f"{tokens} tokens, {name}:", *(f"\n  {us:9.1f}  {key}" for key, us in times.items()))
    return rows, {"apart": apart, "kernels": seen}


def step(scale: Scale, layers: int) -> list[list[object]]:
    """Of a whole trainer. What it computes its experts by is what transformers finds under our
    name.
    """
    length, count = scale.choose(512, 4), scale.choose(16, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = describe(scale, Path(folder), Qwen3MoeConfig, layers)
        config = AutoConfig.from_pretrained(path)
        config.vocab_size = scale.choose(151936 // 6 // 16 * 16, 96)
        config.save_pretrained(path)
        settings = TrainerConfig(
            model_path=path, random_init=True, device=str(scale.device), dtype="bfloat16",
            micro_batch_size=count, activation_checkpointing="layers", learning_rate=1e-9,
        )  # fmt: skip
        trainer = Trainer(settings, MemorySaver(device=scale.device))
    torch.manual_seed(0)
    prompts, answers = torch.randint(config.vocab_size, (2, count, length)).tolist()
    batch = SequenceBatch(prompt_ids=prompts, response_ids=answers)
    advantages = [1.0 - 2.0 * (i % 2) for i in range(count)]
    old = trainer.compute_log_prob(batch)
    batch = dataclasses.replace(batch, old_logprobs=old, advantages=advantages)
    rows: list[list[object]] = []
    for method in (trainer.compute_log_prob, trainer.update_actor):

        def run(own: Callable[..., Tensor], method: Any = method) -> object:
            ALL_EXPERTS_FUNCTIONS.register(NAME, own)
            return method(batch)

        ms = in_turn(scale, {name: partial(run, own) for name, own in RUNS.items()})
        rows.append([f"{layers} layers, {method.__name__}", *ms.values(), ""])
        print(rows[-1], flush=True)
    ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)
    trainer.close()
    assert trainer.saver is not None
    trainer.saver.close()
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--tokens", type=int, nargs="*", help="instead of 4,096 and 16,384")
    args = options.parse_args(arguments)
    scale = make_scale(args)
    config = Qwen3MoeConfig(
        num_experts=scale.choose(128, 8), num_experts_per_tok=scale.choose(8, 2),
        hidden_size=scale.choose(2048, 48), moe_intermediate_size=scale.choose(768, 32),
    )  # fmt: skip
    rows, found = list[list[object]](), dict[str, Any]()
    for tokens in args.tokens or ((20,) if scale.tiny else (4096, 16384)):
        more, found[str(tokens)] = alone(scale, config, tokens)
        rows += more
    rows += step(scale, 2 if scale.tiny else args.layers)
    head = ["case", *(f"{name}, ms" for name in RUNS), "products at the data sheet's rate, ms"]
    report("bench_moe_train", head, rows, {"ms": rows, "experts": found}, args.out)


if __name__ == "__main__":
    main()
