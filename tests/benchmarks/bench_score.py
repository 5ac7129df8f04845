"""The trainer's scores and update at the Qwen2.5-0.5B shape, of sequences end to end and without
logits of the whole vocabulary, beside the same passes over padded ones, and over whole logits.
`make bench-score`.

The packaged recipe's step (fp32 masters and Adam, bf16 forward, 64 sequences of 512 tokens, or with
`--random` of 1 to 512, micro batches of 16 or as given), random weights, one process. One trainer
after the other, of the same weights: end to end with MLPs computed again, as the recipe has it, end
to end, padded, and padded over whole logits; their log-probabilities and gradients are compared,
and the log-probabilities with those of a trainer in fp32.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.common import (
    MIB,
    TINY,
    Scale,
    make_scale,
    median_ms,
    parser,
    report,
    settle,
    write_config,
)
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.training import Runtime
from trainer_bridge.training.batch import MicroBatch
from trainer_bridge.training.losses import (
    add_gradients,
    micro_logprobs,
    ppo_clip,
    score_tokens,
    token_logits,
    token_logprobs,
)
from trainer_bridge.training.optimizer import optimizer_step
from trainer_bridge.training.packing import packs

PROMPT, TEMPERATURE = 24, 1.0
WAYS = ("end to end, MLPs again", "end to end", "padded", "padded, whole logits")
Score = Callable[[MicroBatch], tuple[Tensor, Tensor]]


def make_batch(scale: Scale, words: int, lengths_vary: bool) -> SequenceBatch:
    count, most = scale.choose(64, 9), scale.choose(512, 5)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (count, PROMPT + most), generator=draw).tolist()
    lengths = torch.full((count,), most)
    if lengths_vary:
        lengths = torch.randint(1, most + 1, (count,), generator=draw)
    return SequenceBatch(
        prompt_ids=[row[:PROMPT] for row in ids],
        response_ids=[row[PROMPT : PROMPT + n] for row, n in zip(ids, lengths, strict=True)],
        old_logprobs=[[-math.log(words)] * int(length) for length in lengths],
        advantages=torch.randn(count, generator=draw).tolist(),
        temperature=TEMPERATURE,
    )


class Passes:
    """One trainer; what it does by `score`, in its own words, is what `Trainer` does itself."""

    def __init__(self, config: TrainerConfig, batch: SequenceBatch, way: str) -> None:
        again = "mlp" if way == WAYS[0] else "none"
        config = dataclasses.replace(config, activation_checkpointing=again)
        self.config, self.batch, self._whole = config, batch, way == WAYS[3]
        runtime = Runtime.open(config.device)
        if way not in WAYS[:2]:
            runtime = dataclasses.replace(runtime, packed_attention=None)
        self.runtime, self.trainer = runtime, Trainer(config, runtime=runtime)
        assert packs(self.trainer.model) == (way in WAYS[:2])

    def score(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        model = self.trainer.model
        if not self._whole:
            return micro_logprobs(model, micro, TEMPERATURE)
        # how every family computes that changes its logits behind the head
        return token_logprobs(token_logits(model, micro), micro.target, TEMPERATURE)

    def scored(self) -> list[list[float]]:
        if not self._whole:
            return self.trainer.compute_log_prob(self.batch)
        size, model = self.config.micro_batch_size, self.trainer.model
        rows = lambda micro: self.score(micro)[0]  # noqa: E731
        return score_tokens(model, self.batch, rows, size, self.runtime)

    def learn(self) -> None:
        """Leaves the gradients."""

        def backward(micro: MicroBatch) -> list[float]:
            logprobs, entropy = self.score(micro)
            old, gains = (self.batch.of_tokens(x, micro) for x in ("old_logprobs", "advantages"))
            sums = ppo_clip(logprobs, old, gains, 0.2, 0.2)
            (sums.loss / self.batch.num_tokens).backward()
            return [float(x) for x in (sums.loss.detach(), sums.clipped, sums.kl, entropy.sum())]

        model, size = self.trainer.model, self.config.micro_batch_size
        add_gradients(model, self.batch, backward, size, self.runtime)

    def update(self) -> None:
        if not self._whole:
            self.trainer.update_actor(self.batch)
            return
        self.trainer.zero_grad()
        self.learn()
        optimizer_step(self.trainer.optimizer, self.config, 0)

    def results(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities and gradients, on the host."""
        scores = flat(self.scored())
        self.learn()
        params = self.trainer.model.parameters()
        grads = torch.cat([param.grad.to_local().flatten().cpu() for param in params])
        self.trainer.zero_grad()
        return scores, grads


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row])


def measured(scale: Scale, run: Callable[[], object]) -> dict[str, float]:
    """Of a pass: median time, and the most MiB in use and held by torch, all of the trainer's
    included.
    """
    settle()
    gc.collect()  # the trainer before
    torch.cuda.empty_cache()
    if scale.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(run, scale.choose(5, 1), scale.choose(2, 0), scale.device)
    stats = torch.cuda.memory_stats() if scale.on_gpu else {}
    most = {name: stats.get(f"{name}_bytes.all.peak", 0) / MIB for name in ("active", "reserved")}
    return {"ms": ms, **most}


def compare(
    found: dict[str, tuple[Tensor, Tensor]], exact: Tensor, layers: int
) -> dict[str, float]:
    """Logits below 4 in bf16 that are rounded to a neighbour move a log-probability by at most two
    units of 2**-6, and each of 15 operations of a layer may round so; these, of random signs, move
    gradients.
    """
    apart: dict[str, float] = {}
    one, *others = found.values()
    for way, (scores, grads) in zip([*found][1:], others, strict=True):
        apart[f"log-probabilities, max, {way}"] = float((one[0] - scores).abs().max())
        apart[f"gradients, relative, {way}"] = float((one[1] - grads).norm() / grads.norm())
    for way, (scores, _) in found.items():
        gap = (scores - exact).abs()
        apart[f"from fp32, max, {way}"] = float(gap.max())
        apart[f"from fp32, mean, {way}"] = float(gap.mean())
    allowed = (1 + math.sqrt(15 * layers)) * torch.finfo(torch.bfloat16).eps
    for name, value in apart.items():
        limit = allowed if name.startswith("gradients") else allowed * 4
        assert value <= limit, f"{name}: {value} > {limit}"
    return apart


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--micro-batch-size", type=int, default=16)
    options.add_argument("--random", action="store_true", help="answers of 1 to 512 tokens")
    args = options.parse_args(arguments)
    scale = make_scale(args)
    sizes: dict[str, Any] = TINY | {"num_hidden_layers": 1} if scale.tiny else {}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            model_path=str(write_config(Path(folder), "0.5b", **sizes)),
            random_init=True,
            device=str(scale.device),
            param_dtype="bfloat16",
            micro_batch_size=args.micro_batch_size,
        )
        words = sizes.get("vocab_size", 151936)
        batch = make_batch(scale, words, args.random)
        found, times = {}, {}
        for way in WAYS:
            passes = Passes(config, batch, way)
            layers = passes.trainer.model.config.num_hidden_layers
            found[way] = passes.results()
            times[f"compute_log_prob, {way}"] = measured(scale, passes.scored)
            times[f"update_actor, {way}"] = measured(scale, passes.update)
            passes.trainer.close()
            del passes
        exact = Passes(dataclasses.replace(config, param_dtype=None), batch, WAYS[2])
        apart = compare(found, flat(exact.scored()), layers)
        exact.trainer.close()
    print(f"{len(batch)} sequences, {batch.num_tokens} response tokens; apart: {apart}")
    rows = [[name, *each.values()] for name, each in times.items()]
    head = ["pass", "ms", "most MiB in use", "most MiB held by torch"]
    report("bench_score", head, rows, {"passes": times, "apart": apart}, args.out)


if __name__ == "__main__":
    main()
