"""Log-probabilities of the rollout against the trainer's, beside the trainer's own mismatch. `make
bench-mismatch MODEL=DIR`.

Own mismatch: `transformers`' full forward against its cached decode of the same tokens, same
weights, dtype and run. For fp32 a forward in fp64 says how far each of the three is from the truth.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout import SamplingParams
from tests.benchmarks.common import Scale, make_scale, parser, random_model, report
from trainer_bridge import Cycle, SequenceBatch, TrainerConfig, open_inprocess

SAMPLES, PROMPT = 64, 64


def answer_tokens(scale: Scale) -> int:
    return scale.choose(256, 4)


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (
        torch.log_softmax(wide / temperature, -1)
        .gather(-1, ids.unsqueeze(-1))
        .squeeze(-1)
        .double()
        .cpu()
    )


@torch.no_grad()
def full_forward(model: Any, ids: Tensor, temperature: float, rows: int = 8) -> Tensor:
    keep = torch.arange(PROMPT - 1, ids.shape[1] - 1, device=ids.device)
    return torch.cat(
        [
            token_logprobs(model(part, logits_to_keep=keep).logits, part[:, PROMPT:], temperature)
            for part in ids.split(rows)
        ]
    )


@torch.no_grad()
def cached_decode(model: Any, ids: Tensor, temperature: float) -> Tensor:
    out = model(ids[:, :PROMPT], use_cache=True, logits_to_keep=1)
    columns = [token_logprobs(out.logits[:, -1], ids[:, PROMPT], temperature)]
    for at in range(PROMPT, ids.shape[1] - 1):
        out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
        columns.append(token_logprobs(out.logits[:, -1], ids[:, at + 1], temperature))
    return torch.stack(columns, 1)


def rollout_and_trainer(
    scale: Scale, path: Path, dtype: str, inputs: list[list[int]], temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, the rollout's log-probabilities, the trainer's)."""
    config = TrainerConfig(
        model_path=str(path), dtype=dtype, device=str(scale.device), micro_batch_size=8
    )
    engine = {"kv_tokens": SAMPLES * 512, "max_running": SAMPLES, "max_context_len": 512}
    with open_inprocess(config, engine) as (trainer, rollout):
        cycle = Cycle(trainer, rollout)
        cycle.to_rollout(1)
        sampling = SamplingParams(
            max_tokens=answer_tokens(scale), temperature=temperature, ignore_eos=True, seed=1
        )
        out = rollout.generate(inputs, sampling)
        cycle.to_score()
        answers = [list(group[0].token_ids) for group in out]
        batch = SequenceBatch(prompt_ids=inputs, response_ids=answers, temperature=temperature)
        scored = trainer.compute_log_prob(batch)
    ids = torch.tensor(
        [given + answer for given, answer in zip(inputs, answers, strict=True)], device=scale.device
    )
    own = torch.tensor([group[0].logprobs for group in out], dtype=torch.float64)
    return ids, own, torch.tensor(scored, dtype=torch.float64)


def measure(
    scale: Scale, name: str, path: Path, dtype: str, temperature: float
) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    inputs = torch.randint(scale.choose(1000, 90), (scale.choose(SAMPLES, 4), PROMPT)).tolist()
    ids, rollout, trainer = rollout_and_trainer(scale, path, dtype, inputs, temperature)
    torch.cuda.empty_cache()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model = model.to(scale.device).eval()
    full, cached = full_forward(model, ids, temperature), cached_decode(model, ids, temperature)
    pairs = {"rollout - trainer": (rollout, trainer), "transformers, cached - full": (cached, full)}
    if dtype == "float32":
        model.double()
        exact = full_forward(model, ids, temperature, rows=2)
        others = {"rollout": rollout, "trainer": trainer, "transformers, cached": cached}
        pairs |= {f"{who} - fp64": (values, exact) for who, values in others.items()}
    rows = []
    for what, (one, other) in pairs.items():
        mismatch = (one - other).abs()
        rows.append(
            {
                "model": name,
                "dtype": dtype,
                "pair": what,
                "mean": float(mismatch.mean()),
                "max": float(mismatch.max()),
                "p99.9": float(mismatch.flatten().quantile(0.999)),
                "tokens": mismatch.numel(),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--model", type=Path, help="a directory with a trained model, such as SmolLM2's"
    )
    options.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="of the samples, and of all log-probabilities",
    )
    args = options.parse_args(arguments)
    scale, rows = make_scale(args), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        random_model(scale, Path(folder), "0.5b", torch.float32)
        models = [("Qwen2.5-0.5B shape, random", Path(folder))] + (
            [(args.model.name, args.model)] if args.model else []
        )
        for name, where in models:
            for dtype in ("float32", "bfloat16"):
                rows += measure(scale, name, where, dtype, args.temperature)
                torch.cuda.empty_cache()
    print(f"{SAMPLES} samples of {answer_tokens(scale)} tokens at temperature {args.temperature:g}")
    head = ["model", "dtype", "absolute difference of log-probabilities", "mean", "99.9 %", "max"]
    cells = [
        [r["model"], r["dtype"], r["pair"], *(f"{r[k]:.2e}" for k in ("mean", "p99.9", "max"))]
        for r in rows
    ]
    report("bench_mismatch", head, cells, {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
