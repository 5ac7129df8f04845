"""Generation at the Qwen2.5-0.5B shape against `transformers.generate`, with the same weights.

`make bench-rollout`. 256 prompts of 128 tokens, 128 new tokens each, bf16, random weights. Before
the engine is timed, its log-probabilities are compared with a full forward of the same model.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Scale, make_scale, median_ms, parser, random_model, report
from rollout import Completion, Engine, SamplingParams

COMPARED = 8  # samples


@torch.no_grad()
def check(model: Any, inputs: list[list[int]], out: list[list[Completion]]) -> float:
    """Return the mean difference of the engine's log-probabilities from the model's."""
    completions = [group[0] for group in out[:COMPARED]]
    ids = torch.tensor(
        [given + list(done.token_ids) for given, done in zip(inputs, completions, strict=False)]
    )
    ids, prompt = ids.to(model.device), len(inputs[0])
    logp = torch.log_softmax(model(ids).logits[:, prompt - 1 : -1].float(), -1)
    theirs = logp.gather(-1, ids[:, prompt:, None]).squeeze(-1).cpu()
    mismatch = float((theirs - torch.tensor([done.logprobs for done in completions])).abs().mean())
    assert mismatch < 0.05, f"the engine's log-probabilities differ by {mismatch} on average"
    return mismatch


def measure(
    scale: Scale, sizes: tuple[int, int, int], folder: Path
) -> tuple[dict[str, float], float]:
    """Return the milliseconds of each way, and the largest mismatch.

    `sizes` are the number of prompts, and the tokens of a prompt and of an answer.
    """
    batch, prompt, answer = sizes
    milliseconds = partial(median_ms, repeats=scale.choose(3, 1), warmup=scale.choose(1, 0))
    model = random_model(scale, folder, "qwen2.5-0.5b", torch.bfloat16)
    torch.manual_seed(0)
    inputs = torch.randint(model.config.vocab_size, (batch, prompt)).tolist()
    ms, mismatches = dict[str, float](), []
    for name, graphs in (("engine", True), ("engine without CUDA graphs", False)):
        engine = Engine.from_pretrained(
            folder, device=scale.device, dtype=torch.bfloat16, max_running=batch,
            kv_tokens=batch * (prompt + answer + 16),
            max_prefill_tokens=4096, max_context_len=512, cuda_graphs=graphs,
            prefix_cache=False,  # every round computes its prompts
        )  # fmt: skip
        for kind, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            generate = partial(
                engine.generate,
                inputs,
                SamplingParams(max_tokens=answer, temperature=temperature, ignore_eos=True),
            )
            mismatches.append(check(model, inputs, generate()))
            ms[f"{name}, {kind}"] = milliseconds(generate)
        engine.saver.close()
        del engine, generate
    given = torch.tensor(inputs, device=scale.device)
    options = {
        "max_new_tokens": answer,
        "min_new_tokens": answer,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(given)
    ms["transformers.generate, sampled"] = milliseconds(
        lambda: model.generate(given, attention_mask=mask, **options)
    )
    return ms, max(mismatches)


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(arguments)
    scale = make_scale(args)
    sizes = batch, prompt, answer = (8, 8, 4) if scale.tiny else (256, 128, 128)
    with tempfile.TemporaryDirectory() as folder:
        ms, mismatch = measure(scale, sizes, Path(folder))
    rival = ms["transformers.generate, sampled"]
    print(
        f"log-probabilities against a full forward in bf16: mean difference at most {mismatch:.4f}"
    )
    rows = [
        [name, time, f"{1e3 * batch * answer / time:,.0f}", rival / time]
        for name, time in ms.items()
    ]
    head = [
        f"batch {batch}, {prompt} + {answer} tokens, bf16",
        "ms",
        "new tokens/s",
        "x transformers",
    ]
    report("bench_generate", head, rows, {"ms": ms, "mismatch": mismatch}, args.out)


if __name__ == "__main__":
    main()
