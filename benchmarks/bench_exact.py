"""Times of the engine's attention, and of a training step with and without `exact`.

`python -m benchmarks.bench_exact`. Cases `decode` (in a CUDA graph) and `prefill` time one layer of
the 0.5B and 7B shapes; they run on any commit, to compare two. Case `step` times one update of
64 answers with `TrainerConfig.exact` and without, and the pass over the answers that `exact` saves.
Every number is a median.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.common import (
    Scale,
    make_scale,
    median_ms,
    parser,
    random_trainer,
    report,
    settle,
)
from rollout.ops.torch_attention import BatchShape, StoredKV
from rollout.ops.triton_attention import plan_decode, plan_triton, triton_attention
from trainer_bridge import SequenceBatch

HEADS = {64: (14, 2), 128: (28, 4)}  # by width: query heads and KV heads
LENGTHS, BATCHES = (200, 4_000, 32_000), (1, 256)
MOST_PREFILL = 1 << 18  # tokens of a prefill batch
LAYERS = 20  # launches in a timed run


class Update(NamedTuple):
    """A trainer whose update is timed."""

    shape: str
    layers: int | None  # None: all
    micro_batch: int
    recomputed: str  # activations

    def __str__(self) -> str:
        return f"{self.shape}, micro batch {self.micro_batch}, recomputed {self.recomputed}"


UPDATES = (
    Update("qwen2.5-0.5b", None, 64, "mlp"),
    Update("qwen2.5-0.5b", None, 8, "layers"),
    Update("qwen2.5-7b", 6, 8, "layers"),
    Update("qwen3-30b-a3b", 4, 8, "layers"),
)


def decode_rows(scale: Scale) -> Iterator[tuple[str, float]]:
    """Yield each case and its microseconds per layer."""
    for name, stored, table, heads in _caches(scale):
        yield f"decode, {name}", _decode(scale, stored, table, heads)


def prefill_rows(scale: Scale) -> Iterator[tuple[str, float]]:
    """Yield each case and its microseconds per layer; a batch has at most `MOST_PREFILL` tokens."""
    for _, stored, table, heads in _caches(scale):
        batch, length = table.shape
        count = min(batch, max(1, MOST_PREFILL // length))
        if batch == 1 or count > 1:
            name = f"width {stored.k.shape[-1]}, {count} x {length:,} tokens"
            yield f"prefill, {name}", _prefill(scale, stored, table[:count], heads)


def _caches(scale: Scale) -> Iterator[tuple[str, StoredKV, torch.Tensor, int]]:
    """Yield the name, keys and values, slots [batch, length] and query heads of each case."""
    lengths, batches = ((20,), (2,)) if scale.tiny else (LENGTHS, BATCHES)
    for (width, (heads, kv_heads)), length, batch in product(HEADS.items(), lengths, batches):
        settle(scale.device)
        shape = 2, batch * length, kv_heads, width
        keys, values = torch.randn(shape, dtype=torch.bfloat16, device=scale.device)
        numbers = torch.arange(batch * length, dtype=torch.int32, device=scale.device)
        name = f"width {width}, {batch} x {length:,} tokens"
        yield name, StoredKV(k=keys, v=values), numbers.view(batch, length), heads


def _decode(scale: Scale, stored: StoredKV, table: torch.Tensor, heads: int) -> float:
    batch, length = table.shape
    q = torch.randn(batch, heads, stored.k.shape[-1], device=scale.device).to(stored.k.dtype)
    out = torch.empty_like(q)
    rows = torch.arange(batch, device=scale.device)
    plan = plan_decode(rows, torch.full_like(rows, length - 1), table)

    def layers() -> None:
        for _ in range(1 if scale.tiny else LAYERS):
            triton_attention(q, stored, plan, q.shape[-1] ** -0.5, out)

    layers()
    run: Callable[[], object] = layers
    if scale.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        run = graph.replay
    return _microseconds(scale, run)


def _prefill(scale: Scale, stored: StoredKV, table: torch.Tensor, heads: int) -> float:
    batch, length = table.shape
    shape = (batch * length, heads, stored.k.shape[-1])
    q = torch.randn(shape, dtype=stored.k.dtype, device=scale.device)
    out, lengths = torch.empty_like(q), [length] * batch
    sizes = BatchShape(rows=range(batch), q_lens=lengths, kv_lens=lengths, num_decode=0)
    plan = plan_triton(sizes, table)

    def layers() -> None:
        for _ in range(1 if scale.tiny else LAYERS):
            triton_attention(q, stored, plan, q.shape[-1] ** -0.5, out)

    return _microseconds(scale, layers)


def _microseconds(scale: Scale, run: Callable[[], object]) -> float:
    ms = median_ms(run, repeats=scale.choose(9, 1), warmup=scale.choose(2, 0))
    return 1e3 * ms / (1 if scale.tiny else LAYERS)


def step_rows(scale: Scale) -> Iterator[tuple[str, float]]:
    """Yield each case and its milliseconds."""
    for update in UPDATES[: scale.choose(len(UPDATES), 1)]:
        for exact in (False, True):
            options: dict[str, Any] = {
                "micro_batch_size": update.micro_batch,
                "activation_checkpointing": update.recomputed,
                "exact": exact,
            }
            with random_trainer(scale, update.shape, update.layers, **options) as trainer:
                batch = _batch(scale, trainer.model.config.vocab_size)
                runs: dict[str, Callable[[], Any]] = {
                    "update": lambda trainer=trainer, batch=batch: trainer.update_actor(batch),
                    "log-probabilities": lambda trainer=trainer, batch=batch: (
                        trainer.compute_log_prob(batch)
                    ),
                }
                for name, run in runs.items():
                    label = f"{name}, {update}, {'exact' if exact else 'plain'}"
                    yield label, median_ms(run, scale.choose(5, 1), scale.choose(2, 0))


def _batch(scale: Scale, vocab: int) -> SequenceBatch:
    rng = random.Random(0)
    count, prompt, answer = (4, 6, 5) if scale.tiny else (64, 256, 768)
    drawn = [[rng.randrange(vocab) for _ in range(prompt + answer)] for _ in range(count)]
    return SequenceBatch(
        prompt_ids=[ids[:prompt] for ids in drawn],
        response_ids=[ids[prompt:] for ids in drawn],
        old_logprobs=[[-10.0] * answer for _ in drawn],
        advantages=[rng.gauss(0, 1) for _ in drawn],
    )


CASES = {"decode": (decode_rows, "us"), "prefill": (prefill_rows, "us"), "step": (step_rows, "ms")}


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, CASES).parse_args(arguments)
    scale = make_scale(args)
    results: dict[str, dict[str, float]] = {}
    rows = list[list[object]]()
    for case in args.cases:
        measure, unit = CASES[case]
        results[case] = {}
        for name, value in measure(scale):
            results[case][name] = value
            rows.append([name, f"{value:,.1f} {unit}"])
    report("bench_exact", ["what", "time"], rows, results, args.out)


if __name__ == "__main__":
    main()
