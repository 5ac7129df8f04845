"""Figures of what was learnt: reward and evaluations, log-probability gap, critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.watch.live import beside_the_task
from recipes.watch.plots import TAG_COLOURS, gap_panel, reward_panel, tidy
from recipes.watch.report.chart import Chart, Tip, between, draw_chart
from recipes.watch.report.reading import Row, RunRecord

CRITIC = {
    "value_loss": "loss of the critic",
    "kl_to_reference": "KL to the reference, nats a token",
}


def step_tips(axes: Axes, rows: Sequence[Row], names: Mapping[str, str]) -> list[Tip]:
    """One tip a row: its step, and the value of every key of `names` under the name given there."""
    tips = []
    for row, (left, right) in zip(rows, between([row["step"] for row in rows]), strict=True):
        values = [f"{label}: {row[key]:.6g}" for key, label in names.items() if row.get(key) is not None]
        tips.append(Tip(axes=axes, left=left, right=right, text="\n".join([f"step {row['step']}", *values])))
    return tips


def reward_chart(run: RunRecord) -> Chart | None:
    train = run.rows_with("reward", "exact_match")
    evaluations = [row for row in run.evaluations if "exact_match" in row]
    if not train:
        return None

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        reward_panel(axes, [*train, *evaluations])
        axes.set(xlabel="step")
        tidy(axes)
        return step_tips(axes, _with_evaluations(train, evaluations), _reward_names(evaluations))

    caption = (
        "Up is better. The smoothed reward should rise, and the held-out points with it: samples that improve "
        "alone are problems learnt by heart."
    )
    return draw_chart("reward", "Reward and evaluations", caption, 3.4, build)


def _reward_names(evaluations: Sequence[Row]) -> dict[str, str]:
    names = {"reward": "reward", "exact_match": "exact match of samples", "held_out": "held-out exact match"}
    for row in evaluations:
        names |= {f"held_out {key}": f"held-out exact match, {name}" for key, name in beside_the_task(row).items()}
    return names


def _with_evaluations(train: Sequence[Row], evaluations: Sequence[Row]) -> list[Row]:
    """Training rows, each with the figures of the evaluation after it, if there was one."""
    found = {row["step"]: row for row in evaluations}
    joined = []
    for row in train:
        after = found.get(row["step"], {})
        beside = {f"held_out {key}": after[key] for key in beside_the_task(after)}
        joined.append({**row, "held_out": after.get("exact_match"), **beside})
    return joined


def gap_chart(run: RunRecord) -> Chart | None:
    rows = run.rows_with("gap_mean", "gap_max")
    if not rows:
        return None

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        gap_panel(axes, rows)
        axes.set(xlabel="step")
        tidy(axes)
        return step_tips(axes, rows, {"gap_mean": "mean gap", "gap_max": "largest gap"})

    caption = (
        "How far the rollout's log-probabilities are from the trainer's for the same tokens. It should stay flat: "
        "below 1e-5 on the mean in float32, some 1e-2 in bfloat16. A jump means that the two no longer compute with "
        "the same weights."
    )
    return draw_chart("gap", "Log-probability gap, rollout against trainer", caption, 2.4, build)


def critic_chart(run: RunRecord) -> Chart | None:
    """Value loss and KL to the reference, a panel each; None where no row has any of them."""
    found = {key: label for key, label in CRITIC.items() if run.rows_with(key)}
    if not found:
        return None

    def build(figure: Figure) -> list[Tip]:
        panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        tips = []
        for axes, (key, label), colour in zip(panels, found.items(), TAG_COLOURS.values(), strict=False):
            rows = run.rows_with(key)
            axes.plot([row["step"] for row in rows], [row[key] for row in rows], color=colour, linewidth=1.6)
            axes.set_title(label, loc="left")
            tidy(axes)
            tips += step_tips(axes, rows, {key: label})
        panels[-1].set_xlabel("step")
        return tips

    caption = (
        "The critic's loss should fall at first and then stay low. KL grows as the policy leaves the reference; growth "
        "that speeds up while the reward does not is drift."
    )
    return draw_chart("critic", "Critic and reference", caption, 0.5 + 1.7 * len(found), build)
