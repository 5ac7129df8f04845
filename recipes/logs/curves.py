"""Curves of a run over its steps, in panels, and what they say in words."""

import math
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from recipes.logs.metric_rows import BULKY, QUALITY, Row, brief, numbers_of, of_kind

Curve = list[tuple[int, float]]  # step and value
PANELS = (  # title, axis, scale, and pattern of the names of the curves
    ("Reward", "reward", "linear", "reward|reward(_.+)?, held-out"),
    ("Reward functions", "mean of the step", "linear", "rewards/.+/mean"),
    ("Reward by set of problems", "mean of the step", "linear", "sets/.+/reward"),
    ("Correct and cut-off answers", "share", "linear", f"correct|cut_off|{QUALITY}, held-out"),
    ("Length of answers", "tokens", "linear", "response_length|length(_.+)?, held-out"),
    ("Entropy", "nats per token", "linear", "entropy"),
    ("Log-probability mismatch", "nats per token", "log", "mismatch_mean|mismatch_max"),
    ("KL divergence from the reference", "nats per token", "linear", "kl_to_reference"),
    ("Critic", "explained variance", "linear", "value_explained_variance"),
)


class Panel(NamedTuple):
    """Curves that share a picture.

    Attributes:
        title: Subject of the curves.
        axis: Name or unit of the values.
        scale: "linear" or "log".
        curves: Curves by name; names of those of evaluations end with "held-out".
    """

    title: str
    axis: str
    scale: str
    curves: dict[str, Curve]

    def courses(self) -> dict[str, str]:
        """Return what each curve did, as a sentence without its subject, the name."""
        return {name: _course(curve) for name, curve in self.curves.items()}


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """Return the panels for which a run has figures; values that are not finite are left out.

    A single reward function or set has no panel if its curve is that of the reward.
    """
    curves: dict[str, Curve] = {}
    for row in (*of_kind(rows, "train"), *of_kind(rows, "eval")):
        for figure, value in numbers_of(row, BULKY).items():
            name = f"{figure}, held-out" if row["kind"] == "eval" else figure
            if math.isfinite(value):
                curves.setdefault(name, []).append((row["step"], value))
    panels = []
    for title, axis, scale, pattern in PANELS:
        names = [name for name in curves if re.fullmatch(pattern, name)]
        own = {re.sub("^(rewards|sets)/(.+)/.+", r"\2", name): curves[name] for name in names}
        if own and ("/" not in pattern or [*own.values()] != [curves.get("reward")]):
            panels.append(Panel(title, axis, scale, own))
    return panels


def _course(curve: Curve) -> str:
    """Say how a curve went from its first to its last value, and where its largest value is."""
    (begin, first), (end, last) = curve[0], curve[-1]
    step, largest = max(curve, key=itemgetter(1))
    start, stop, top = map(brief, (first, last, largest))
    steps = f"step {end}" if begin == end else f"steps {begin} and {end}"
    moved = f"{'rose' if last > first else 'fell'} from {start} to {stop} between {steps}"
    course = f"was {stop} at {steps}" if start == stop else moved
    return f"{course}." if top in (start, stop) else f"{course}; highest {top} at step {step}."
