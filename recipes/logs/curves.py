"""Curves of a run over its steps, in panels, and what they say in words."""

import math
import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from recipes.logs.metric_rows import BULKY, QUALITY, Row, brief, numbers_of, of_kind

Curve = list[tuple[int, float]]  # step and value
PANELS = (  # title, axis, scale, and patterns for the figures of steps and of evaluations
    ("Reward", "reward", "linear", "reward", "reward(_.+)?"),
    ("Reward functions", "mean of the step", "linear", "rewards/.+/mean", ""),
    ("Reward by set of problems", "mean of the step", "linear", "sets/.+/reward", ""),
    (
        "Correct and cut-off answers",
        "share of answers",
        "linear",
        "correct|cut_off",
        QUALITY.pattern,
    ),
    ("Length of answers", "tokens", "linear", "response_length", "length(_.+)?"),
    ("Entropy", "nats per token", "linear", "entropy", ""),
    ("Log-probability mismatch", "nats per token", "log", "mismatch_mean|mismatch_max", ""),
    ("KL divergence from the reference", "nats per token", "linear", "kl_to_reference", ""),
    ("Critic", "explained variance", "linear", "value_explained_variance", ""),
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

    A single reward function or set has no panel, because the curve of the reward shows it.
    """
    train, held_out = (_curves(of_kind(rows, kind)) for kind in ("train", "eval"))
    panels = []
    for title, axis, scale, of_steps, of_evaluations in PANELS:
        names = [name for name in train if re.fullmatch(of_steps, name)]
        curves = {re.sub("^(rewards|sets)/(.+)/.+", r"\2", name): train[name] for name in names}
        names = [name for name in held_out if re.fullmatch(of_evaluations, name)]
        curves |= {f"{name}, held-out": held_out[name] for name in names}
        if len(curves) > ("/" in of_steps):
            panels.append(Panel(title, axis, scale, curves))
    return panels


def _curves(rows: Iterable[Row]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, value in numbers_of(row, BULKY).items():
            if math.isfinite(value):
                curves.setdefault(name, []).append((row["step"], value))
    return curves


def _course(curve: Curve) -> str:
    """Say how a curve went from its first to its last value, and where its largest value is."""
    (begin, first), (end, last) = curve[0], curve[-1]
    if begin == end:
        return f"was {brief(last)} at step {end}."
    step, largest = max(curve, key=itemgetter(1))
    start, stop, top = map(brief, (first, last, largest))
    verb = "rose" if last > first else "fell"
    course = f"{verb} from {start} to {stop} between steps {begin} and {end}"
    if start == stop:
        course = f"was {stop} at steps {begin} and {end}"
    return f"{course}." if top in (start, stop) else f"{course}; highest {top} at step {step}."
