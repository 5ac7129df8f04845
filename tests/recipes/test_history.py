"""Memory over time from events, and the step and the wake-up that are looked at closely."""

from __future__ import annotations

import pytest

from memsaver import Event
from recipes.history import by_process, levels, one_step, stages_between, wake_up


def event(time: float, tag: str, committed: int, backup: int = 0) -> Event:
    return Event(time=time, seconds=0.0, op="resume", tag=tag, committed_bytes=committed, backup_bytes=backup)


EVENTS = {
    "trainer 0": [event(1.0, "params", 10), event(3.0, "params", 0, 10)],
    "trainer 1": [event(1.5, "params", 20), event(6.0, "params", 0)],
    "rollout": [event(2.0, "weights", 5), event(4.0, "extra", 1)],
}


def test_levels_add_up_by_tag_or_by_process() -> None:
    found = levels(EVENTS, 0.0, 5.0)
    assert found.times == [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    weights, params, extra = [0, 0, 0, 5, 5, 5, 5], [0, 10, 30, 30, 20, 20, 20], [0, 0, 0, 0, 0, 1, 1]
    assert found.held == {"weights": weights, "params": params, "extra": extra}
    assert found.kept == [0, 0, 0, 0, 10, 10, 10]
    assert levels(EVENTS, 0.0, 5.0, by_process).held == {
        "rollout": [0, 0, 0, 5, 5, 6, 6],
        "trainer 0": [0, 10, 10, 10, 0, 0, 0],
        "trainer 1": [0, 0, 20, 20, 20, 20, 20],
    }
    later = levels(EVENTS, 3.5, 4.5)  # begins with what is held then
    assert later.times == [3.5, 4.0, 4.5] and later.kept == [10, 10, 10]
    assert later.held == {"weights": [5, 5, 5], "params": [20, 20, 20], "extra": [0, 1, 1]}


def test_thinned_levels_keep_the_peak_of_each_column_and_how_it_ends() -> None:
    bursts = [event(second + part / 100, "params", part % 7) for second in range(10) for part in range(1, 81)]
    found = levels({"trainer": bursts}, 0.0, 10.0)
    thin = found.thinned(10)
    assert thin.times[:5] == [0.0, 0.8, 1.01, 1.8, 2.01] and thin.times[-1] == 10.0
    assert thin.held["params"] == [6, 80 % 7] * 10 + [80 % 7]
    assert found.thinned(1000) is found


def test_the_zoom_is_the_last_step_of_the_ordinary_kind() -> None:
    spans = [("build", 0.0, 1.0), ("step 1", 1.0, 2.0), ("step 2", 2.0, 3.5), ("park_optim", 3.5, 3.6)]
    assert one_step(spans) == (2.0, 3.5, "step 2")
    assert one_step([*spans, ("save_checkpoint", 3.0, 3.2)]) == (1.0, 2.0, "step 1")
    assert one_step(spans[:1]) == (0.0, 1.0, "incomplete")
    assert stages_between(spans, 0.0, 3.5) == spans[:1]


@pytest.mark.parametrize("first", ["park_optim", "park_critic", "empty_cache", "wake_weights"])
def test_the_wake_up_begins_with_its_first_stage_whatever_is_kept(first: str) -> None:
    spans = [("update_actor", 0.0, 1.0), (first, 2.0, 2.5), ("wake_kv_cache", 3.0, 4.0), ("sleep", 5.0, 6.0)]
    begin, end = wake_up(spans, 0.0, 6.0)
    assert begin == 2.0 and 4.0 <= end < 5.0
