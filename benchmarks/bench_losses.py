"""The learning curve of every loss and advantage, as small multiples on one picture.

`make bench-losses`. A recipe, by default the toy task of `tiny`, runs once for each case and seed
with the case's keys. Runs stay in the folder `--out`, and the next call skips finished runs.
Runs of another recipe or of other keys need another folder.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.common import parser, report
from recipes.config.load import load
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, RunError, one_line
from recipes.logs.metric_rows import Row, whole_rows
from recipes.logs.pictures import COLORS, STYLE, save_picture
from recipes.run import start_run

GRPO, FOUR = "GRPO", "GRPO, 2 x 2"
TWICE = "loop.epochs=2 loop.mini_batches=2"
ROWS = {
    "Advantages": {
        GRPO: "",
        "scaled by batch": "grpo.scale=batch",
        "RLOO": "grpo.baseline=leave_one_out grpo.scale=none",
        "REINFORCE++": "grpo.baseline=batch grpo.scale=batch",
        "PPO with critic": "algorithm=ppo",
    },
    "What the loss averages and adds": {
        "mean of answers": "loss.aggregation=sequence",
        "constant length": "loss.aggregation=constant",
        "Dr. GRPO": "loss.aggregation=constant grpo.scale=none",
        "cut-off left out": "loss.mask_cut_off=true",
        "entropy bonus": "loss.entropy_coef=0.02",
    },
    "KL divergence from the reference": {
        "k3 in the loss": "loss.kl_coef=0.05",
        "k2 in the loss": "loss.kl_coef=0.05 loss.kl_estimator=k2",
        "k1 in the rewards": "loss.kl_coef=0.05 loss.kl_in=reward",
        "k1 with REINFORCE++": "loss.kl_coef=0.05 loss.kl_in=reward "
        "grpo.baseline=batch grpo.scale=batch",
    },
    "Four updates a step: two epochs of two mini-batches": {
        FOUR: TWICE,
        "clip-higher": f"{TWICE} loss.clip_high=0.28",
        "dual clip": f"{TWICE} loss.dual_clip=3",
        "GSPO": f"{TWICE} loss.kind=gspo",
        "CISPO": f"{TWICE} loss.kind=cispo loss.clip_low=1 loss.clip_high=4",
    },
}
"""Keys of each case, by row of the picture."""

CASES = {name: keys for row in ROWS.values() for name, keys in row.items()}
SIZES = {
    "tiny": "steps=40 loop.prompts_per_step=32 loop.samples_per_prompt=8 "
    "trainer.learning_rate=3.0e-3"
}
"""Keys by recipe that make its curves tell something in little time."""

TINY = "steps=2 loop.prompts_per_step=2 loop.samples_per_prompt=4"
ALWAYS = "checkpoint.every=0 checkpoint.export_every=null eval.patience=0 samples=0 "
ALWAYS += "exact=false"  # Only some cases could be exact.
METRICS = "metrics.jsonl"
LAST = 5  # steps of the final reward
PANEL = (1.75, 1.6)  # inches
GRAY: dict[str, Any] = {
    GRPO: {"color": "#8c8c8c", "linewidth": 1, "linestyle": "-"},
    FOUR: {"color": "#8c8c8c", "linewidth": 1, "linestyle": (0, (2, 1))},
}


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Figures of a case.

    Attributes:
        rewards: Mean reward of each step, [seeds, steps].
        correct: Held-out exact match after the last step of each seed; empty: not evaluated.
        clip_fraction: Mean over steps and seeds.
        seconds: All steps of a run, mean over seeds.
    """

    rewards: np.ndarray[Any, np.dtype[np.float64]]
    correct: list[float]
    clip_fraction: float
    seconds: float

    @property
    def final(self) -> list[float]:
        """Return the mean reward of the last steps of each seed."""
        return self.rewards[:, -LAST:].mean(axis=1).tolist()


def curves_of(runs: Sequence[Sequence[Row]]) -> Curves:
    """Return the figures of a case from the rows of its runs."""
    trained = [[row for row in rows if row["kind"] == "train"] for rows in runs]
    evaluated = [[row for row in rows if row["kind"] == "eval"] for rows in runs]
    rewards = np.array([[row["reward"] for row in rows] for rows in trained])
    clipped = [row.get("clip_fraction", 0.0) for rows in trained for row in rows]
    return Curves(
        rewards=rewards,
        correct=[rows[-1]["correct"] for rows in evaluated if rows],
        clip_fraction=float(np.mean(clipped)),
        seconds=sum(row["step_seconds"] for rows in trained for row in rows) / len(runs),
    )


# ---------------------------------------------------------------- runs


def settings_of(case: str, common: Sequence[str], recipe: Recipe) -> list[str]:
    """Return the overrides of a case, with the keys that all cases have.

    `recipe` is that of plain GRPO, whose sizes and learning rate PPO takes over.
    """
    keys = CASES[case].split()
    if "algorithm=ppo" not in keys:
        return [*common, *keys]
    rate = recipe.trainer.learning_rate
    others = [key for key in common if not key.startswith("grpo.")]
    sizes = (
        f"loop.prompts_per_step={recipe.prompts_per_step}",
        (f"loop.samples_per_prompt={recipe.samples_per_prompt}"),
    )
    return [*others, *keys, *sizes, f"ppo.critic_learning_rate={rate}"]


def finished(recipe: str, settings: Sequence[str], folder: Path) -> list[Row]:
    """Return the rows of a finished run in a folder; run it there unless it is done.

    A run that was killed starts again.

    Raises:
        RecipeError: The recipe cannot run, or the folder has a run of other keys.
        RunError: The run failed.
    """
    wanted, saved, metrics = load(recipe, settings), folder / "recipe.yaml", folder / METRICS
    if saved.is_file() and load(saved) != wanted:
        raise RecipeError(f"{folder}: holds a run of other keys; give another --out")
    rows, last = whole_rows(metrics), ("eval" if wanted.eval.every else "train", wanted.steps)
    if not rows or (rows[-1]["kind"], rows[-1]["step"]) != last:
        if saved.is_file():
            shutil.rmtree(folder)
        start_run(recipe, settings, folder)
    return whole_rows(metrics)


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Curves | None]]:
    """Yield each case with its figures, or with None if a run failed."""
    common = [*ALWAYS.split(), *SIZES.get(args.recipe, "").split()]
    common += TINY.split() if args.tiny else []
    common += [f"steps={args.steps}"] if args.steps else []
    common += args.set
    plain = load(args.recipe, common)
    common.append(f"eval.every={plain.steps if plain.eval.every else 0}")
    number, count = 0, len(args.cases) * args.seeds
    for case in args.cases:
        runs = []
        for seed in range(args.seeds):
            number += 1
            name = f"{re.sub(r'[^a-z0-9]+', '-', case.lower()).strip('-')}-{seed}"
            print(f"[{number}/{count}] {name} ...", end=" ", flush=True)
            settings = [*settings_of(case, common, plain), f"seed={seed}"]
            started = time.perf_counter()
            try:
                with (
                    open(args.out / f"{name}.log", "a") as log,
                    contextlib.redirect_stdout(log),
                ):
                    rows = finished(args.recipe, settings, args.out / name)
            except (RecipeError, RunError) as error:
                print(f"FAILED: {one_line(error)}", flush=True)
            except Exception:
                print("FAILED:", flush=True)
                traceback.print_exc()
            else:
                runs.append(rows)
                reward = np.mean(curves_of([rows]).final)
                print(f"reward {reward:.2f}, {time.perf_counter() - started:.0f} s", flush=True)
        yield case, curves_of(runs) if len(runs) == args.seeds else None


# ---------------------------------------------------------------- picture


@matplotlib.rc_context({**STYLE, "font.size": 7.5})
def draw(curves: Mapping[str, Curves], recipe: str, file: Path) -> None:
    """Draw a panel for each case, with the curves that it is compared with in gray."""
    rows = {head: [name for name in row if name in curves] for head, row in ROWS.items()}
    rows = {head: names for head, names in rows.items() if names}
    columns = max(map(len, rows.values()))
    size = (max(columns, 4) * PANEL[0] + 0.4, len(rows) * PANEL[1] + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False)
    for line, (head, names) in zip(grid, rows.items(), strict=True):
        color = COLORS[list(ROWS).index(head)]
        for axes, name in zip(line, names, strict=False):
            for other in _beside(name, curves):
                mean = curves[other].rewards.mean(axis=0)
                axes.plot(_steps(mean), mean, **GRAY[other])
            _panel(axes, name, curves[name], color)
        for axes in line[len(names) :]:
            axes.set_axis_off()
        title = line[0].annotate(
            head, (0, 1), (0, 18), "axes fraction", textcoords="offset points", weight="bold"
        )
        title.set_in_layout(False)  # It is wider than its panel.
    figure.get_layout_engine().set(h_pad=0.13, w_pad=0.03)
    seeds = len(next(iter(curves.values())).rewards)
    shown = {other for name in curves for other in _beside(name, curves)}
    lines = [Line2D([], [], label=other, **look) for other, look in GRAY.items() if other in shown]
    band = Patch(color=COLORS[0], alpha=0.25, label=f"smallest to largest of {seeds} seeds")
    mean_line = Line2D([], [], color=COLORS[0], ls="-", label=f"mean; number: last {LAST} steps")
    figure.legend(handles=[mean_line, band, *lines], loc="outside upper right", ncols=4)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel(f"mean reward of a step's answers, recipe {recipe}", fontsize=8)
    save_picture(figure, file)


def _beside(name: str, curves: Mapping[str, Curves]) -> list[str]:
    """Return the cases that are drawn in gray behind a case."""
    others = [GRPO, FOUR] if TWICE in CASES[name] else [GRPO]
    return [other for other in others if other in curves and other != name]


def _panel(axes: Axes, name: str, own: Curves, color: str) -> None:
    steps, rewards = _steps(own.rewards[0]), own.rewards
    band = {"color": color, "alpha": 0.25, "linewidth": 0}
    axes.fill_between(steps, rewards.min(axis=0), rewards.max(axis=0), **band)
    axes.plot(steps, rewards.mean(axis=0), color=color, linewidth=1.5, linestyle="-")
    axes.set_title(name, fontsize=7.5, loc="left", pad=3)
    final = f"{np.mean(own.final):.2f}"
    axes.text(0.97, 0.06, final, transform=axes.transAxes, ha="right", weight="bold")


def _steps(rewards: Sequence[float]) -> range:
    return range(1, len(rewards) + 1)


# ---------------------------------------------------------------- script


def table(curves: Mapping[str, Curves]) -> tuple[list[str], list[list[object]]]:
    """Return head and rows of the table."""
    head = ["case", f"reward, last {LAST} steps", "seeds", "held-out exact match"]
    rows: list[list[object]] = []
    for case, own in curves.items():
        span = f"{min(own.final):.2f} to {max(own.final):.2f}"
        exact = float(np.mean(own.correct)) if own.correct else ""
        rows.append([case, float(np.mean(own.final)), span, exact, own.clip_fraction, own.seconds])
    return [*head, "clip fraction", "s"], rows


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, CASES)
    options.set_defaults(out=Path("runs/losses"))
    options.add_argument("--recipe", default="tiny", help="recipe of GRPO (default: tiny)")
    options.add_argument("--steps", type=int, help="steps of a run")
    options.add_argument("--seeds", type=int, default=2, help="runs of each case (default: 2)")
    options.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of all runs"
    )
    options.add_argument("--picture", type=Path, help="file (default: OUT/bench_losses.png)")
    args = options.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    measured = dict(measure(args))
    curves = {case: own for case, own in measured.items() if own is not None}
    results = {
        case: {"keys": CASES[case], "correct": own.correct, "reward": own.rewards.tolist()}
        for case, own in curves.items()
    }
    report("bench_losses", *table(curves), results, args.out)
    if curves:
        picture = args.picture or args.out / "bench_losses.png"
        draw(curves, args.recipe, picture)
        print(picture)
    if failed := [case for case in measured if case not in curves]:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
