"""Log-prob mismatch and held-out accuracy of exact, plain and corrected runs, as one picture.

`python -m benchmarks.bench_exact_learning`. The recipe runs once for each case. Runs stay in the
folder `--out`, and the next call skips finished runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.bench_losses import finished
from benchmarks.common import parser, report
from recipes.logs.metric_rows import Row
from recipes.logs.pictures import STYLE, save_picture

FP8 = "engine.kv_cache_dtype=fp8_e4m3"
CASES = {
    "exact": "exact=true",
    "bf16, uncorrected": "exact=false",
    "fp8 cache, uncorrected": f"{FP8} correction.mode=none",
    "fp8 cache, corrected": FP8,
}
ALWAYS = "driver=inprocess checkpoint.every=0 checkpoint.export_every=null samples=0"
TINY = "steps=2 eval.every=1 loop.prompts_per_step=2 loop.samples_per_prompt=4"
LEAST = 1e-4  # nats; smaller mismatches are drawn on a linear scale


@matplotlib.rc_context(STYLE)
def draw(runs: dict[str, list[Row]], score: str, file: Path) -> None:
    """Draw the largest mismatch of each step, and a score of held-out problems."""
    figure = Figure(figsize=(7.4, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for case, rows in runs.items():
        trained, evaluated = ([row for row in rows if row["kind"] == k] for k in ("train", "eval"))
        steps, gaps = zip(*((row["step"], row["mismatch_max"]) for row in trained), strict=True)
        left.plot(steps, gaps, label=case, linewidth=1)
        steps, scores = zip(*((row["step"], row[score]) for row in evaluated), strict=True)
        right.plot(steps, scores, linewidth=1.5)
    left.set_yscale("symlog", linthresh=LEAST)
    left.set(ylim=(-LEAST / 5, None), ylabel="largest mismatch in nats", xlabel="step")
    right.set(ylim=(0, 1), ylabel=f"held-out {score.replace('_', ' ')}", xlabel="step")
    figure.legend(loc="outside upper center", ncols=len(runs))
    save_picture(figure, file)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, CASES)
    options.set_defaults(out=Path("runs/exact"))
    options.add_argument("--recipe", default="smollm2-135m", help="(default: smollm2-135m)")
    options.add_argument("--score", default="correct_2_digits", help="of held-out problems")
    args = options.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = dict[str, list[Row]]()
    for case in args.cases:
        settings = [*ALWAYS.split(), *(TINY.split() if args.tiny else []), *CASES[case].split()]
        name = re.sub(r"\W+", "-", case)
        runs[case] = finished(args.recipe, settings, args.out / name)
    table = list[list[object]]()
    for case, rows in runs.items():
        trained = [row for row in rows if row["kind"] == "train"]
        gaps = [row["mismatch_max"] for row in trained]
        unequal = (
            sum(row["unequal_tokens"] for row in trained) if "exact=true" in CASES[case] else ""
        )
        tokens = sum(row["tokens"] for row in trained)
        table.append([case, tokens, unequal, max(gaps), rows[-1][args.score]])
    head = ["case", "tokens", "unequal tokens", "largest mismatch, nats", args.score]
    results = {str(row[0]): dict(zip(head[1:], row[1:], strict=True)) for row in table}
    report("bench_exact_learning", head, table, results, args.out)
    draw(runs, args.score, args.out / "bench_exact_learning.png")


if __name__ == "__main__":
    main()
