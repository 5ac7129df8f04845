"""The page: one file that holds everything, looked at in a real browser, whatever the run's folder
lacks.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from matplotlib import image

import recipes
from memsaver.report import Timeline
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.logs.report_page import FOLDER, write_report
from tests.helpers.recipes import browser
from tests.helpers.recipes.folders import MIB, make_run

CHARTS = 11
SECTIONS = ["learning", "time", "memory", "speed", "run"]
PEAKS = {
    "update_actor": {"device_bytes": 12 * MIB, "processes": {"trainer": 12 * MIB, "rollout": 0}}
}
PLAN = {"stages": [{"stage": "update_actor", "device_bytes": {"trainer": 12 * MIB, "rollout": 0}}]}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with everything there is: critic, plan, peaks, two sessions."""
    run = make_run(
        tmp_path_factory.mktemp("runs") / "whole", value_loss=0.5, peaks=PEAKS, plan=PLAN
    )
    shutil.copy(run / "trace.json", run / "trace-until-step-6-1.json")
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def chromium() -> str:
    return browser.find_browser()


def test_the_page_needs_nothing_from_outside(page: Path) -> None:
    html = page.read_text()
    assert "://" not in html and "@import" not in html
    assert re.findall(r'\ssrc="', html) == []
    assert {link for link in re.findall(r'href="(.*?)"', html) if not link.startswith("#")} == {
        "data:,"
    }
    assert {link for link in re.findall(r"url\((.*?)\)", html) if not link.startswith("#")} == set()
    ids = set(re.findall(r'\sid="(.*?)"', html))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', html)) <= ids


def test_every_colour_of_a_chart_is_one_of_the_theme(page: Path) -> None:
    style = (FOLDER / "page.css").read_text()
    charts = re.findall(r'<svg class="chart".*?</svg>', page.read_text(), re.DOTALL)
    assert len(charts) == CHARTS
    for chart in charts:
        assert not re.search("#[0-9a-fA-F]{6}", chart)
        assert all(f"--{name}:" in style for name in re.findall(r"var\(--([a-z0-9-]+)\)", chart))


def test_what_a_run_writes_is_text_on_the_page(tmp_path: Path) -> None:
    run = tmp_path / "run <i>"
    run.mkdir()
    (run / "recipe.yaml").write_text("steps: 1\ntask: {name: '<script>alert(1)</script>'}\n")
    timeline = Timeline()
    stage = r"cost $\frac{1 5$ <b>"  # matplotlib reads formulas between dollars
    timeline.span("step 1", 0.0, 2.0, "stages")
    timeline.span(stage, 0.5, 1.5, "stages")
    timeline.span("pause params", 0.5, 0.6, "trainer", bytes=100, backup=3)
    timeline.write(run / "trace.json")
    html = write_report(run, tmp_path / "out.html").read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html and "run &lt;i&gt;" in html
    assert stage.replace("<b>", "&lt;b&gt;") in html and stage not in html


def test_in_a_browser(chromium: str, page: Path, tmp_path: Path) -> None:
    found = browser.look(chromium, page, tmp_path)
    assert found["errors"] == [] and found["titles"] > 100
    assert found["sections"] == SECTIONS and len(found["charts"]) == CHARTS
    assert found["requests"] == []
    assert found["overlaps"] == [] and found["outside"] == [] and found["wider"] <= 0


def test_the_probe_sees_what_is_wrong(chromium: str, page: Path, tmp_path: Path) -> None:
    """A page made worse: each finding of the test above can be there."""
    html = page.read_text().replace("<h1>", '<img src="http://memsaver.invalid/x.png"><h1>')
    html = html.replace(
        "<script>", "<script>addEventListener('load', () => { throw new Error('worse'); });", 1
    )
    html = html.replace(
        '<g class="tips">',
        '<text x="20" y="20">one</text><text x="21" y="20">two</text>'
        '<text x="-30" y="60">three</text><g class="tips">',
        1,
    )
    html = html.replace("<dl ", '<div style="width: 2000px">wide</div><dl ', 1)
    worse = tmp_path / "worse.html"
    worse.write_text(html)
    found = browser.look(chromium, worse, tmp_path)
    assert found["errors"] == ["Uncaught Error: worse"]
    assert found["requests"] == ["http://memsaver.invalid/x.png"]
    assert "Reward and evaluations: two / one" in found["overlaps"]
    assert "Reward and evaluations: three" in found["outside"] and found["wider"] >= 1000


def test_dark_and_narrow(chromium: str, page: Path, tmp_path: Path) -> None:
    picture = image.imread(browser.screenshot(chromium, page, tmp_path, 500, 1600, browser.DARK))
    assert picture.shape[:2] == (1600, 500)
    assert picture[2, 2, :3].max() < 0.15  # the ground is dark
    bright = (picture[..., :3].min(axis=2) > 0.6).mean()
    colourful = ((picture[..., :3].max(axis=2) - picture[..., :3].min(axis=2)) > 0.25).mean()
    assert 0.01 < bright < 0.2 and colourful > 0.002  # text, and curves


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (["trace.json"], ["trace.json is missing", "Memory by tag and phase", "<b>One step</b>"]),
        (
            ["metrics.jsonl", "recipe.yaml"],
            ["metrics.jsonl is missing", "recipe.yaml is missing", "<b>Generation</b>"],
        ),
        (
            ["trace.json", "metrics.jsonl", "environment.json"],
            ["<b>Memory by tag</b>", "<b>Where it ran</b>"],
        ),
    ],
    ids=["killed", "trace only", "nothing but the recipe"],
)
def test_a_partial_folder_gives_a_page_that_says_so(
    tmp_path: Path, lacking: list[str], said: list[str]
) -> None:
    run = make_run(tmp_path / "run", steps=1)
    for name in lacking:
        (run / name).unlink()
    html = write_report(run).read_text()
    assert re.findall(r'<section id="(.*?)">', html) == SECTIONS
    for words in said:
        assert words in html


def test_no_run_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent"
    assert main(["report", str(absent)]) == main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"memsaver: report {absent}: no such folder; "
        "give the folder of a run, for example runs/tiny-...\n"
        f"memsaver: report {tmp_path}: holds no run (no recipe.yaml); "
        "give the folder that memsaver run printed\n"
    )


def test_nowhere_to_write_and_no_matplotlib_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(
        RecipeError, match="--out .*: cannot be written: No such file or directory; name a place"
    ):
        write_report(tmp_path, tmp_path / "no" / "where.html")
    monkeypatch.setitem(__import__("sys").modules, "recipes.logs.plots", None)
    monkeypatch.delattr(recipes.logs, "plots", raising=False)
    with pytest.raises(RecipeError, match=r"pip install 'memsaver\[plots\]'"):
        write_report(tmp_path, tmp_path / "out.html")
