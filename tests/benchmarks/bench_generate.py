"""Generation at the Qwen2.5-0.5B shape against `transformers.generate`, same weights, same run. `make bench-rollout`.

256 prompts of 128 tokens, 128 new tokens each, bf16, random weights. Before it is timed, the engine's log-probabilities
are compared with a full forward of the same model.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollout import Completion, Engine, SamplingParams
from tests.benchmarks.common import conditions, median_ms, print_table, random_model, save

BATCH, PROMPT, ANSWER = 256, 128, 128
REPEATS = 3


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(BATCH)]


def seconds(run: Callable[[], object]) -> float:
    return median_ms(run, repeats=REPEATS, warmup=1) / 1e3


@torch.no_grad()
def check(model: Any, inputs: list[list[int]], out: list[list[Completion]]) -> float:
    """Mean difference of the engine's log-probabilities from the model's, over 8 of the samples."""
    ids = torch.tensor([inputs[i] + list(out[i][0].token_ids) for i in range(8)], device="cuda")
    logp = torch.log_softmax(model(ids).logits[:, PROMPT - 1 : -1].float(), -1)
    theirs = logp.gather(-1, ids[:, PROMPT:, None]).squeeze(-1).cpu()
    gap = float((theirs - torch.tensor([out[i][0].logprobs for i in range(8)])).abs().mean())
    assert gap < 0.05, f"the engine's log-probabilities differ by {gap} on average"
    return gap


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model = random_model(path, "0.5b", torch.bfloat16)
        inputs = prompts(model.config.vocab_size)
        result: dict[str, float] = {}
        for name, graphs in (("engine", True), ("engine without CUDA graphs", False)):
            engine = Engine.from_pretrained(
                path, device="cuda:0", dtype=torch.bfloat16, kv_tokens=BATCH * (PROMPT + ANSWER + 16),
                max_running=BATCH, max_prefill_tokens=8192, max_context_len=512, cuda_graphs=graphs,
                prefix_cache=False,  # every round computes its prompts
            )  # fmt: skip
            for kind, temperature in (("sampled", 1.0), ("greedy", 0.0)):
                params = SamplingParams(max_tokens=ANSWER, temperature=temperature, ignore_eos=True)
                out = engine.generate(inputs, params)
                result["gap"] = max(result.get("gap", 0.0), check(model, inputs, out))
                result[f"{name}, {kind}"] = seconds(
                    lambda params=params, engine=engine: engine.generate(inputs, params)
                )
            engine.saver.close()
            del engine
    given = torch.tensor(inputs, device="cuda")
    options: dict[str, Any] = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": True, "top_k": 0}
    mask = torch.ones_like(given)
    result["transformers.generate, sampled"] = seconds(
        lambda: model.generate(given, attention_mask=mask, pad_token_id=0, **options)
    )
    tokens = BATCH * ANSWER
    rival = result["transformers.generate, sampled"]
    print(conditions())
    print(f"log-probabilities against a full forward in bf16: mean difference at most {result['gap']:.4f}")
    rows = [
        [name, time_ * 1e3, f"{tokens / time_:,.0f}", rival / time_] for name, time_ in result.items() if name != "gap"
    ]
    print_table(["batch 256, 128 + 128 tokens, bf16", "ms", "new tokens/s", "x transformers"], rows)
    save(args.out, "bench_generate", result)


if __name__ == "__main__":
    main()
