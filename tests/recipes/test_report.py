"""The page about a run: one file that holds everything, also when the run's folder lacks some."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.logs.report_page import key_figures, planned_and_measured, write_report
from recipes.logs.run_folder import Run, whole_rows
from tests.helpers.recipes.folders import MIB, make_run
from tests.helpers.recipes.runs import PNG, Row

PEAKS = {
    "update_actor": {"device_bytes": 12 * MIB, "processes": {"trainer": 12 * MIB, "rollout": 0}}
}
PLAN = {"stages": [{"stage": "update_actor", "device_bytes": {"trainer": 12 * MIB, "rollout": 0}}]}
GPU = {"gpu_bytes": 80 * 2**30}


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, its text, and rows of cells by heading."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.text = self._since = ""
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._since = ""
        if tag == "tr":
            self.rows[self._heading].append([])

    def handle_data(self, data: str) -> None:
        self.text += data
        self._since += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "h2":
            self._heading = self._since
            self.rows[self._heading] = []
        if tag in ("td", "th"):
            self.rows[self._heading][-1].append(self._since)

    def sources(self) -> list[str]:
        return [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a page can show."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return make_run(folder, peaks=PEAKS, plan=PLAN, hidden_seconds=0.25)


def test_page_shows_pictures_and_tables_and_needs_nothing_from_outside(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = Page(run / "report.html")
    reward, memory, speed = (base64.b64decode(uri.partition(",")[2]) for uri in page.sources())
    assert memory.startswith(PNG) and b"<svg" in reward and b"<svg" in speed
    assert b"nats per token" in reward and b"tokens per second" in speed
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    assert {tag for tag, _ in page.tags} & {"script", "object", "iframe"} == set()
    links = [attributes.get("href") for _, attributes in page.tags if "href" in attributes]
    assert links == ["data:,"] and "://" not in (run / "report.html").read_text()
    assert page.rows["Planned and measured"][1:] == [
        ["update_actor", "12.0 MiB", "12.0 MiB", "+0.0 %", "✓"],
        ["– trainer", "12.0 MiB", "12.0 MiB", "+0.0 %", "✓"],
        ["– rollout", "0 B", "0 B", "–", ""],
    ]
    assert page.rows["Evaluations"] == [
        ["updates", "held-out"], ["0", "0.125"], ["6", "0.75"],
    ]  # fmt: skip
    assert page.rows["Every step"][6][:4] == ["6", "0.6", "0.3", "1e-06"]
    assert {"date", "GPUs", "torch"} <= {row[0] for row in page.rows["Where it ran"][1:]}
    for words in ("6 of 6", "0.100 → 0.600", "12 % → 75 %", "kv_tokens"):
        assert words in page.text


def test_key_figures_are_those_of_the_rows(run: Path) -> None:
    record = Run(rows=whole_rows(run / "metrics.jsonl"))
    figures = key_figures(record)
    assert figures["reward, first and last step"] == "0.100 → 0.600"
    assert figures["held-out exact match"] == "12 % → 75 %"
    assert figures["switch, median"] == "0.140 s, 14.0% of the step"
    assert figures["moved beside work, median"] == "0.250 s"
    assert figures["tokens per second, median"] == "400"
    assert figures["log-probability mismatch, median"] == "1.0e-06"
    assert key_figures(Run()) == {}


def test_text_that_a_run_writes_is_text_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run <i>"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("steps: 1\ntask: {name: '<script>alert(1)</script>'}\n")
    html = write_report(folder, tmp_path / "out.html").read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html and "run &lt;i&gt;" in html


def test_page_of_a_killed_run_shows_what_there_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "killed", steps=3, done=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    (folder / "environment.json").unlink()
    page = Page(write_report(folder))
    assert len(page.sources()) == 2 and "2 of 3" in page.text and "Nothing to show" in page.text
    assert len(page.rows["Every step"]) == 3 and "Where it ran" not in page.rows
    (folder / "metrics.jsonl").unlink()
    page = Page(write_report(folder))
    assert page.sources() == [] and "0 of 3" in page.text


def peaks(stage: str, device: int | None, **processes: int) -> Row:
    measured = {stage: {"device_bytes": device, "processes": processes}}
    return {"kind": "train", "step": 1, "peaks": measured}


def test_plan_is_compared_with_the_largest_peak_of_every_stage() -> None:
    stages = [
        {"stage": "update_actor", "device_bytes": {"trainer": 100 * MIB, "rollout": 2 * MIB}},
        {"stage": "sync_weights", "device_bytes": {"trainer": 98 * MIB}},
        {"stage": "never_ran", "device_bytes": {"trainer": 1}},
        {"stage": "before_an_update", "device_bytes": {"trainer": 100 * MIB}},
    ]
    first = peaks("before_an_update", 60 * MIB, trainer=60 * MIB)
    ranks = {"trainer[0]": 88 * MIB, "trainer[1]": 100 * MIB, "rollout[0]": 0}
    rows = [
        first,
        peaks("update_actor", 90 * MIB, **ranks),
        peaks("update_actor", 100 * MIB, **{"trainer[0]": 99 * MIB}),
        peaks("sync_weights", None, trainer=100 * MIB),
    ]
    plan = {"stages": stages, **GPU}
    assert planned_and_measured(rows, plan) == [
        ("update_actor", "102.0 MiB", "100.0 MiB", "+2.0 %", "✓"),
        ("– trainer", "100.0 MiB", "100.0 MiB", "+0.0 %", "✓"),
        ("– rollout", "2.0 MiB", "0 B", "–", "✗"),
        ("sync_weights", "98.0 MiB", "not measured", "–", ""),
        ("– trainer", "98.0 MiB", "100.0 MiB", "-2.0 %", "✗"),
    ]
    outside = {"assumed": 3 * 2**30, "measured": 2 * 2**30}
    found = planned_and_measured(rows, {**plan, "outside": outside})
    last = ("outside of tags, at the start", "3.00 GiB", "2.00 GiB", "+50.0 %", "✓")
    assert found[-1] == last
    alone = planned_and_measured([first], plan)
    assert alone[0] == ("before_an_update", "100.0 MiB", "60.0 MiB", "+66.7 %", "✗")
    assert planned_and_measured(rows, {}) == planned_and_measured([], plan) == []


def test_a_folder_without_a_run_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    rule = "holds no run (no recipe.yaml); give the folder that memsaver run printed"
    assert capsys.readouterr().err == f"memsaver: report {tmp_path}: {rule}\n"


def test_report_fails_in_one_line_without_place_or_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"steps": 1}))
    nowhere = "--out .*: cannot be written: No such file or directory; name a place"
    with pytest.raises(RecipeError, match=nowhere):
        write_report(tmp_path, tmp_path / "no" / "where.html")
    monkeypatch.setitem(__import__("sys").modules, "recipes.logs.pictures", None)
    with pytest.raises(RecipeError, match=r"pip install 'memsaver\[plots\]'"):
        write_report(tmp_path)
