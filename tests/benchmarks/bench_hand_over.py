"""The switch of one pair of Ray actors, stage by stage, everything offloaded: what leaves goes
through the driver, then over to the other side. `make bench-hand-over`.

Both ways have the same actors, one after the other, with answers, scores and an update in every
step. Log-probabilities of both sides are compared there.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from recipes.arguments import cycle_arguments, open_pair
from recipes.config import Recipe
from recipes.config.loading import load
from recipes.setup.preparation import prepare
from rollout import SamplingParams
from tests.benchmarks.common import parser, report
from trainer_bridge import Cycle, SequenceBatch

TO_ROLLOUT = ["offload_optim", "wake_weights", "sync_weights", "offload_params", "wake_kv_cache"]
BACK = ["sleep", "reload_params", "reload_optim"]
TOTALS = {"to the rollout": TO_ROLLOUT, "back": BACK, "switch": TO_ROLLOUT + BACK}
WAYS = {"driver": False, "handed over": True}
OFFLOADED = ["cycle.resident=[]", "cycle.overlap=[]", "cycle.alias=never"]
CASES = {  # a recipe, what is other there, answers, tokens of each
    "0.5B": ("qwen2.5-0.5b", [], 16, 128),
    "7B, KV pool of 37 GiB": ("qwen2.5-7b", ["engine.kv_tokens=700000"], 16, 64),
    "tiny": ("tiny", ["driver=ray"], 2, 4),
}


def step(cycle: Cycle, pair: Any, version: int, answers: int, tokens: int) -> float:
    """Returns how far apart the log-probabilities of both sides are on average."""
    trainer, rollout = pair
    cycle.to_rollout(version)
    prompts = [[1 + i, 2, 3] for i in range(answers)]
    asked = SamplingParams(max_tokens=tokens, temperature=1.0, seed=version, ignore_eos=True)
    found = [one for (one,) in rollout.generate(prompts, asked)]
    cycle.to_score()
    batch = SequenceBatch(
        prompt_ids=prompts,
        response_ids=[list(one.token_ids) for one in found],
        old_logprobs=[list(one.logprobs) for one in found],
        advantages=[1.0 if i % 2 else -1.0 for i in range(answers)],
    )
    scores = trainer.compute_log_prob(batch)
    cycle.to_train()
    trainer.update_actor(batch)
    pairs = zip(scores, found, strict=True)
    mismatches = [abs(a - b) for row, one in pairs for a, b in zip(row, one.logprobs, strict=True)]
    return statistics.mean(mismatches)


def measured(recipe: Recipe, folder: Path, steps: int, answers: int, tokens: int) -> Any:
    """Milliseconds by way and stage, medians of each way without its first two steps; and the
    largest mismatch of a step.
    """
    found: dict[str, dict[str, float]] = {}
    mismatches: list[float] = []
    with open_pair(prepare(recipe, folder)) as pair:
        for way, hand_over in WAYS.items():
            times: dict[str, list[float]] = defaultdict(list)

            def passed(name: str, start: float, end: float, to: Any = times) -> None:
                to[name].append((end - start) * 1e3)

            arguments = cycle_arguments(recipe) | {"hand_over": hand_over}
            cycle = Cycle(*pair, on_stage=passed, **arguments)
            for _ in range(steps):
                mismatches.append(step(cycle, pair, len(mismatches) + 1, answers, tokens))
                print(way, {name: round(each[-1], 1) for name, each in times.items()}, flush=True)
            found[way] = {name: statistics.median(each[2:]) for name, each in times.items()}
            for total, stages in TOTALS.items():
                found[way][total] = sum(found[way][stage] for stage in stages)
    return found, max(mismatches)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=6, help="each way")
    options.add_argument("--cases", nargs="*", default=[*CASES][:2])
    args = options.parse_args(arguments)
    rows: list[list[object]] = []
    results: dict[str, Any] = {}
    for name in ["tiny"] if args.tiny else args.cases:
        recipe, changes, *sizes = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            loaded = load(recipe, [*OFFLOADED, *changes])
            found, mismatch = measured(loaded, Path(folder), args.steps, *sizes)
        results[name] = {**found, "mismatch": mismatch}
        for stage in [*TO_ROLLOUT, *BACK, *TOTALS]:
            before, after = found["driver"][stage], found["handed over"][stage]
            rows.append([f"{name}: {stage}", before, after, after / before])
        rows.append([f"{name}: log-probability mismatch", mismatch])
    report("bench_hand_over", ["ms", *WAYS, "ratio"], rows, results, args.out)


if __name__ == "__main__":
    main()
