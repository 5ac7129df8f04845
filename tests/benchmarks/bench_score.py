"""The trainer's scores and update at the Qwen2.5-0.5B shape, which make no logits of the whole
vocabulary, beside the same passes over whole logits. `make bench-score`.

The packaged recipe's step (fp32 masters and Adam, bf16 forward, 64 sequences of 512 tokens, micro
batches of 8 or as given), random weights, one process. Both ways by one trainer, in turn; before,
their log-probabilities and gradients are compared.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

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
from trainer_bridge.training.losses import ppo_clip, token_logprobs
from trainer_bridge.training.optimizer import optimizer_step
from trainer_bridge.training.scoring import (
    add_gradients,
    micro_logprobs,
    score_tokens,
    token_logits,
)

PROMPT, TEMPERATURE = 24, 1.0
Score = Callable[[MicroBatch], tuple[Tensor, Tensor]]


class Passes:
    """One trainer; what it does by `score`, in its own words, is what `Trainer` does itself."""

    def __init__(self, scale: Scale, folder: Path, micro_batch_size: int) -> None:
        sizes = TINY | {"num_hidden_layers": 1} if scale.tiny else {}
        path = str(write_config(folder, "0.5b", **sizes))
        self.config = TrainerConfig(
            model_path=path,
            random_init=True,
            device=str(scale.device),
            param_dtype="bfloat16",
            micro_batch_size=micro_batch_size,
        )
        self.runtime = Runtime.open(self.config.device)
        self.trainer = Trainer(self.config, runtime=self.runtime)
        self.batch = self._batch(scale)

    def _batch(self, scale: Scale) -> SequenceBatch:
        count, length = scale.choose(64, 9), scale.choose(512, 5)
        draw = torch.Generator().manual_seed(0)
        words = self.trainer.model.config.vocab_size
        ids = torch.randint(words, (count, PROMPT + length), generator=draw).tolist()
        return SequenceBatch(
            prompt_ids=[row[:PROMPT] for row in ids],
            response_ids=[row[PROMPT:] for row in ids],
            old_logprobs=[[-math.log(words)] * length for _ in ids],
            advantages=torch.randn(count, generator=draw).tolist(),
            temperature=TEMPERATURE,
        )

    def in_slices(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return micro_logprobs(self.trainer.model, micro, TEMPERATURE)

    def whole(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """The rival: how every family computes that changes its logits behind the head."""
        return token_logprobs(token_logits(self.trainer.model, micro), micro.target, TEMPERATURE)

    def scored(self, score: Score) -> Tensor:
        size, model = self.config.micro_batch_size, self.trainer.model
        rows = score_tokens(model, self.batch, lambda micro: score(micro)[0], size, self.runtime)
        return torch.tensor(rows)

    def learn(self, score: Score) -> None:
        """Leaves the gradients."""

        def backward(micro: MicroBatch) -> list[float]:
            logprobs, entropy = score(micro)
            old, gains = (self.batch.of_tokens(x, micro) for x in ("old_logprobs", "advantages"))
            sums = ppo_clip(logprobs, old, gains, 0.2, 0.2)
            (sums.loss / self.batch.num_tokens).backward()
            return [float(x) for x in (sums.loss.detach(), sums.clipped, sums.kl, entropy.sum())]

        model, size = self.trainer.model, self.config.micro_batch_size
        add_gradients(model, self.batch, backward, size, self.runtime)

    def update(self, score: Score) -> None:
        self.trainer.zero_grad()
        self.learn(score)
        optimizer_step(self.trainer.optimizer, self.config, 0)

    def gradients(self, score: Score) -> Tensor:
        self.learn(score)
        params = self.trainer.model.parameters()
        grads = torch.cat([param.grad.to_local().flatten() for param in params])
        self.trainer.zero_grad()
        return grads

    def check(self) -> dict[str, float]:
        """Logits below 4 in bf16 that are rounded to a neighbour move a log-probability by at most
        two units of 2**-6; that and 15 operations of each layer, of random signs, move gradients.
        """
        apart = float((self.scored(self.in_slices) - self.scored(self.whole)).abs().max())
        own, other = self.gradients(self.in_slices), self.gradients(self.whole)
        relative = float((own - other).norm() / other.norm())
        layers = self.trainer.model.config.num_hidden_layers
        assert apart <= 2 * 2**-6, f"log-probabilities are {apart} apart"
        allowed = (1 + math.sqrt(15 * layers)) * torch.finfo(torch.bfloat16).eps
        assert float(own.norm()) > 0 and relative <= allowed, f"gradients: {relative} > {allowed}"
        return {"log-probabilities, max": apart, "gradients, relative": relative}


def measured(scale: Scale, run: Callable[[], object]) -> dict[str, float]:
    """Of a pass: median time, and the most MiB in use and held by torch, all of the trainer's
    included.
    """
    settle()
    torch.cuda.empty_cache()
    if scale.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(run, scale.choose(5, 1), scale.choose(2, 0), scale.device)
    stats = torch.cuda.memory_stats() if scale.on_gpu else {}
    most = {name: stats.get(f"{name}_bytes.all.peak", 0) / MIB for name in ("active", "reserved")}
    return {"ms": ms, **most}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--micro-batch-size", type=int, default=8)
    args = options.parse_args(arguments)
    scale = make_scale(args)
    with tempfile.TemporaryDirectory() as folder:
        passes = Passes(scale, Path(folder), args.micro_batch_size)
        trainer, batch = passes.trainer, passes.batch
        try:
            apart = passes.check()
            runs: dict[str, Callable[[], object]] = {
                "compute_log_prob": lambda: trainer.compute_log_prob(batch),
                "compute_log_prob, whole logits": lambda: passes.scored(passes.whole),
                "update_actor": lambda: trainer.update_actor(batch),
                "update_actor, whole logits": lambda: passes.update(passes.whole),
            }
            found = {name: measured(scale, run) for name, run in runs.items()}
        finally:
            trainer.close()
    print(f"{len(batch)} sequences, {batch.num_tokens} response tokens; apart: {apart}")
    rows = [[name, *each.values()] for name, each in found.items()]
    head = ["pass", "ms", "most MiB in use", "most MiB held by torch"]
    report("bench_score", head, rows, {"passes": found, "apart": apart}, args.out)


if __name__ == "__main__":
    main()
