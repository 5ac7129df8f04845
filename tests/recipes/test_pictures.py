"""The pictures: units on every axis, and nothing that only color tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from memsaver import Event
from recipes.logs.pictures import draw_memory, draw_reward, draw_speed, looks, write_pictures
from recipes.logs.run_folder import Run, Span
from tests.helpers.recipes.folders import MIB, eval_row, train_row
from tests.helpers.recipes.runs import PNG


def event(time: float, tag: str, mib: int, backup: int = 0) -> Event:
    sizes = {"committed_bytes": mib * MIB, "backup_bytes": backup * MIB}
    return Event(time=time, seconds=0.0, op="resume", tag=tag, **sizes)


RUN = Run(
    rows=[
        eval_row(0, 0.25),
        *(train_row(step, kl_to_reference=0.01) for step in (1, 2, 3)),
        eval_row(3, 0.5, exact_match_2_digits=0.125, also_trained=[]),
    ],
    spans=[
        Span("wake_kv_cache", 10.0, 10.1),
        Span("generate_sequences", 10.1, 11.0),
        Span("update_actor", 11.0, 12.0),
        Span("step 1", 10.0, 12.0),
    ],
    events={
        "trainer[0]": [event(9.0, "params", 4), event(10.1, "params", 0, backup=4)],
        "rollout[0]": [event(10.1, "kv_cache", 32)],
        "trainer[1]": [event(10.1, "params", 1000)],
    },
)


def texts(figure: Figure) -> list[list[str]]:
    return [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]


def test_reward_picture_has_a_curve_for_each_evaluation_and_mismatch() -> None:
    figure = draw_reward(RUN)
    above, below = figure.axes
    held_out = {line.get_label(): line.get_xydata().tolist() for line in above.lines}
    assert held_out["exact match, held-out"] == [[0, 0.25], [3, 0.5]]
    assert held_out["exact match, 2 digits (untrained)"] == [[3, 0.125]]
    labels = ["mismatch, mean", "mismatch, largest", "KL from the reference"]
    assert texts(figure)[1] == labels and below.get_ylabel() == "nats per token"
    for axes in figure.axes:
        assert len({line.get_linestyle() for line in axes.lines}) == len(axes.lines)


def test_memory_picture_shows_the_first_device_from_what_it_held_before() -> None:
    figure = draw_memory(RUN)
    lanes, memory = figure.axes
    names = [label.get_text() for label in lanes.get_yticklabels()]
    assert names == ["wake_kv_cache", "generate_sequences", "update_actor"]
    assert set(texts(figure)[0]) == {"rollout", "train", "switch"}
    assert memory.get_ylabel() == "MiB"
    tops = {area.get_label(): area.get_datalim(memory.transData).y1 for area in memory.collections}
    assert tops == {"kv_cache": 32.0, "params": 32.0}
    (host,) = memory.lines
    assert host.get_ydata().tolist() == [0, 4, 4, 4]
    assert list(host.get_xdata()) == pytest.approx([0, 0.1, 0.1, 2])


def test_memory_picture_takes_the_last_step_without_evaluation_or_checkpoint() -> None:
    steps = [Span("step 1", 0.0, 2.0), Span("step 2", 2.0, 4.0)]
    assert Run(spans=steps).one_step() == steps[1]
    assert Run(spans=[*steps, Span("save_checkpoint", 3.0, 4.0)]).one_step() == steps[0]
    assert Run(spans=[steps[0], Span("evaluate", 0.5, 1.0)]).one_step() == steps[0]
    assert Run(spans=[Span("build", 0.0, 1.0)]).one_step() is None


def test_speed_picture_has_the_longest_stages_first() -> None:
    above, below = draw_speed(RUN).axes
    names = [label.get_text() for label in above.get_yticklabels()]
    assert names[:3] == ["generate_sequences", "update_actor", "compute_log_prob"]
    assert above.texts[0].get_text() == " 0.5 s, 50.0%"
    assert below.get_ylabel() == "tokens per second"


def test_every_axis_names_its_unit() -> None:
    for figure in (draw_reward(RUN), draw_memory(RUN), draw_speed(RUN)):
        assert all(axes.get_ylabel() for axes in figure.axes)
        assert figure.axes[-1].get_xlabel() in ("step", "seconds since step 1 began")


def test_areas_differ_by_hatch_as_well_as_by_color() -> None:
    tags = ["weights", "kv_cache", "cuda_graph", "params", "optim", "torch", "contexts"]
    for key in ("hatch", "facecolor"):
        assert len({look[key] for look in list(looks(tags[:5]).values())}) == 5
    both = {(look["hatch"], look["facecolor"]) for look in looks(tags).values()}
    assert len(both) == len(tags) and looks(["optim"]) == {"optim": looks(tags)["optim"]}


def test_a_run_that_did_nothing_has_no_pictures_and_one_without_mismatch_has(
    tmp_path: Path,
) -> None:
    """A mismatch of 0 has no place on a logarithmic axis."""
    write_pictures(Run(spans=[Span("build", 0.0, 1.0)]), tmp_path)
    assert draw_speed(Run()) is None and list(tmp_path.iterdir()) == []
    spans = [Span("something_new", 0.5, 1.5), Span("step 1", 0.0, 2.0)]
    rows = [train_row(1, mismatch_mean=0.0, mismatch_max=0.0)]
    events = {"rollout": [event(1.0, "new_tag", 1)]}
    write_pictures(Run(rows=rows, spans=spans, events=events), tmp_path)
    for name in ("reward.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
