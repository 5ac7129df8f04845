"""Tables of the report, against figures worked out by head."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.report import tables
from recipes.report.reading import RunRecord, read_run
from tests.helpers.recipes.folders import MIB, make_run
from tests.helpers.recipes.runs import Row

GPU = {"name": "H100", "memory": "81559 MiB", "driver": "580.1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "run"))


def peaks(stage: str, device: int | None, **processes: int) -> Row:
    return {"kind": "train", "step": 1, "peaks": {stage: {"device_bytes": device, "processes": processes}}}


def test_key_figures(run: RunRecord) -> None:
    figures = dict(tables.key_figures(run))
    assert figures["steps"] == "6 of 6"
    assert figures["reward, first and last step"] == "0.100 → 0.600"
    assert figures["held-out exact match"] == "12 % → 75 %"
    assert figures["tokens a second, median"] == "400"
    assert figures["weight sync, median"] == "40.0 ms"
    assert figures["peak of all tags"] == "36.0 MiB"  # weights and KV cache
    assert figures["time in all"] == "7.00 s"


def test_key_figures_of_nothing_are_few(tmp_path: Path) -> None:
    assert tables.key_figures(RunRecord(path=tmp_path)) == [("steps", "0 of ?")]


def test_slowest_stages_come_first_with_their_share(run: RunRecord) -> None:
    found = tables.slowest_stages(run)
    assert found.rows[0] == ("generate_sequences", "rollout", "50.0 %", "0.50 s", "0.50 s", "3.00 s", "6")
    assert found.rows[1][:3] == ("update_actor", "train", "24.0 %")
    assert len(found.rows) == 13


def test_planned_and_measured(tmp_path: Path) -> None:
    stages = [
        {"stage": "update_actor", "device_bytes": {"trainer": 100 * MIB, "rollout": 2 * MIB}},
        {"stage": "sync_weights", "device_bytes": {"trainer": 98 * MIB}},
        {"stage": "never_ran", "device_bytes": {"trainer": 1}},
    ]
    rows = [
        peaks("update_actor", 90 * MIB, **{"trainer[0]": 88 * MIB, "trainer[1]": 100 * MIB, "rollout[0]": 0}),
        peaks("update_actor", 100 * MIB, **{"trainer[0]": 99 * MIB}),
        peaks("sync_weights", None, trainer=100 * MIB),
    ]
    plan = {"stages": stages, "gpu": "h100-80gb", "gpu_bytes": 80 * 2**30}
    found = tables.planned_and_measured(RunRecord(path=tmp_path, rows=rows, plan=plan))
    assert "h100-80gb (80.00 GiB)" in found.caption
    assert found.rows == [
        ("update_actor", "102.0 MiB", "100.0 MiB", "+2.0 %", "✓"),
        ("– trainer", "100.0 MiB", "100.0 MiB", "+0.0 %", "✓"),
        ("– rollout", "2.0 MiB", "0 B", "–", "✗"),
        ("sync_weights", "98.0 MiB", "not measured", "–", ""),
        ("– trainer", "98.0 MiB", "100.0 MiB", "-2.0 %", "✗"),
    ]
    assert tables.planned_and_measured(RunRecord(path=tmp_path, rows=rows)) is None
    assert tables.planned_and_measured(RunRecord(path=tmp_path, plan=plan)) is None


def test_evaluations_keep_a_place_for_what_was_not_measured(tmp_path: Path) -> None:
    rows = [
        {"kind": "eval", "step": 0, "exact_match": 0.5, "problems": 4},
        {"kind": "eval", "step": 5, "exact_match": 1.0, "exact_match_2_digits": 0.25, "problems": 4},
    ]
    found = tables.evaluations(RunRecord(path=tmp_path, rows=rows))
    assert list(found.head) == ["updates", "held-out", "2 digits", "problems"]
    assert found.rows == [("0", "0.500", "–", "4"), ("5", "1.000", "0.250", "4")]


def test_where_it_ran(tmp_path: Path) -> None:
    first = {"date": "today", "cpus": 2, "gpus": [GPU, GPU], "packages": {"torch": "2.11"}}
    found = tables.environment(RunRecord(path=tmp_path, environments=[first, {"gpus": []}]))
    cells = {row[0]: row[1:] for row in found.rows}
    assert cells["gpu"] == ("2 x H100, 81559 MiB", "none")
    assert cells["driver"] == ("580.1", "–")
    assert cells["torch"] == ("2.11", "–")
    assert list(found.head) == ["", "session 1", "session 2"]


def test_every_step_has_only_columns_that_are_there(run: RunRecord) -> None:
    found = tables.every_step(run)
    assert list(found.head)[:3] == ["step", "reward", "exact match"] and "value loss" not in found.head
    assert found.rows[2][:3] == ("3", "0.3", "0.15")
