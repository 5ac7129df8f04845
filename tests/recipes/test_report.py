"""Pictures of a run, and its report page, also for run folders with missing files."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import recipes
from memsaver import Event
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.logs.curves import panels_of
from recipes.logs.metric_rows import whole_rows
from recipes.logs.pictures import draw_curves, draw_memory, looks, write_pictures
from recipes.logs.report_page import (
    key_figures,
    measured_peaks,
    memory_held,
    planned_and_measured,
    write_report,
)
from recipes.logs.run_folder import RunFolder
from recipes.logs.stage_trace import Span, StageTrace
from tests.helpers.recipes.run_folders import MIB, add_step, eval_row, make_run, traced, train_row
from tests.helpers.recipes.tiny_runs import PNG, Row

PEAKS = {
    "update_actor": {"device_bytes": 12 * MIB, "processes": {"trainer": 12 * MIB, "rollout": 0}}
}
PLAN = {"stages": [{"stage": "update_actor", "device_bytes": {"trainer": 12 * MIB, "rollout": 0}}]}
GPU = {"gpu_bytes": 80 * 2**30}


class Page(HTMLParser):
    """Parsed page: tags with their attributes, text, and rows of table cells by heading."""

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
    """Build a run with everything that a page can show."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return make_run(folder, peaks=PEAKS, plan=PLAN, hidden_seconds=0.25)


def test_page_has_pictures_and_tables_and_no_external_links(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = Page(run / "report.html")
    *curves, memory = (base64.b64decode(uri.partition(",")[2]) for uri in page.sources())
    assert memory.startswith(PNG) and len(curves) == 4 and all(b"<svg" in uri for uri in curves)
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    assert {tag for tag, _ in page.tags} & {"script", "object", "iframe"} == set()
    links = [attributes.get("href") for _, attributes in page.tags if "href" in attributes]
    assert links == ["data:,"] and "://" not in (run / "report.html").read_text()
    assert page.rows["Planned and measured"][1:] == [
        ["update_actor", "12.0 MiB", "12.0 MiB", "+0.0 %", "✓"],
        ["– trainer", "12.0 MiB", "12.0 MiB", "+0.0 %", "✓"],
        ["– rollout", "0 B", "0 B", "–", ""],
    ]
    assert page.rows["Stages"][1:3] == [
        ["generate_sequences", "0.5", "50.0%"], ["update_actor", "0.24", "24.0%"],
    ]  # fmt: skip
    assert page.rows["Evaluations"] == [
        ["step", "correct", "problems"], ["0", "0.125", "16"], ["6", "0.75", "16"],
    ]  # fmt: skip
    names = ["step", "reward", "correct", "mismatch mean", "mismatch max"]
    assert page.rows["Every step"][0][:5] == names
    assert page.rows["Every step"][6][:4] == ["6", "0.6", "0.3", "1e-06"]
    assert {"date", "GPUs", "torch"} <= {row[0] for row in page.rows["Where it ran"][1:]}
    caption = "reward rose from 0.1 to 0.6 between steps 1 and 6."
    for words in ("6 of 6", "0.100 → 0.600", "12% → 75%", caption, "kv_tokens"):
        assert words in page.text


def test_key_figures_and_the_caption_of_memory_follow_from_the_rows(run: Path) -> None:
    figures = key_figures(whole_rows(run / "metrics.jsonl"))
    assert figures["reward, first and last step"] == "0.100 → 0.600"
    assert figures["held-out, correct"] == "12% → 75%"
    assert figures["switch, median"] == "0.140 s, 14.0% of a step"
    assert figures["overlapped moves, median"] == "0.250 s"
    assert figures["tokens per second, median"] == "400"
    assert figures["log-probability mismatch, median"] == "1.0e-06"
    assert key_figures([]) == {} and memory_held([]) == ""
    turns = {"rollout": {"params": 0, "kv_cache": 3 * MIB}, "train": {"params": MIB, "kv_cache": 0}}
    said = memory_held([train_row(1, memory=turns), train_row(2), eval_row(2, 0.5)])
    sizes = "3.0 MiB in phase rollout, 1.0 MiB in phase train"
    assert said == f"Tags held {sizes}; together they need 4.0 MiB."
    stays = {phase: {"params": MIB} for phase in turns}
    assert memory_held([train_row(1, memory=stays)]) == "Every tag stayed on the device: 1.0 MiB."


def test_page_shows_the_nodes_of_a_run_and_the_bytes_between_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", recipes.load("tiny"))
    folder.add_nodes({"10.0.0.1": "trainer[0]", "10.0.0.2": "rollout[1], rollout[2]"})
    add_step(folder, StageTrace(), 1, sync={"node_bytes": 3 << 20})
    assert main(["report", str(tmp_path / "run")]) == 0
    page = Page(tmp_path / "run/report.html")
    assert ["10.0.0.2", "rollout[1], rollout[2]"] in page.rows["Where it ran"]
    assert key_figures(folder.rows())["between machines in a sync"] == "3.0 MiB"


def test_page_shows_answers_of_the_newest_step_and_evaluation_as_text(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", recipes.load("tiny"))
    hostile = "<script>alert(1)</script>" + "long " * 500
    sample = {"set": "sums", "prompt": "1 + 1", "answer": "2", "completion": hostile}
    sample |= {"reward": None, "correct": False, "finish_reason": "length", "tokens": 7}
    for row in (eval_row(0, 0.0), train_row(1), train_row(2), eval_row(2, 0.5)):
        place = {"kind": row["kind"], "step": row["step"]}
        folder.add_row(row, [{**sample, **place, "tokens": row["step"]}])
    file = write_report(folder.path)
    page = Page(file)
    for title in ("Answers of the newest evaluation (2)", "Answers of the newest step (2)"):
        head, row = page.rows[title]
        assert head[:4] == ["set", "prompt", "answer", "completion"]
        assert row[:3] == ["sums", "1 + 1", "2"] and row[4:] == ["–", "False", "length", "2"]
        assert row[3].startswith("<script>alert(1)</script>long") and len(row[3]) < 1100
    assert "<script" not in file.read_text()


def test_text_of_a_run_is_escaped_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run <i>"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("steps: 1\ntask: {name: '<script>alert(1)</script>'}\n")
    (folder / "metrics.jsonl").touch()
    html = write_report(folder, tmp_path / "out.html").read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html and "run &lt;i&gt;" in html


@pytest.mark.parametrize(
    "recipe",
    [
        "algorithm: ${oc.env:MY_TOKEN}",
        "task: {name: '${oc.env:MY_TOKEN}'}",
        "model: {path: 'a${oc.env:MY_TOKEN}'}",
        "task: '${oc.env:MY_TOKEN}'",
        "eval: {sets: [{data: '\\\\${oc.env:MY_TOKEN}'}]}",
    ],
)
def test_no_command_reads_variables_for_somebody_elses_folder(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret of the reader")
    (tmp_path / "recipe.yaml").write_text(f"steps: 1\n{recipe}\n")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "mismatch").mkdir()
    run = str(tmp_path)
    for words in (
        ["report", run],
        ["export", run, "--to", f"{run}/o"],
        ["trace-mismatch", run],
        ["run", "--resume", run],
    ):
        assert main(words) == 2
        said = capsys.readouterr()
        assert (
            "has a reference, which recipes do not resolve" in said.err
            and "secret" not in said.err + said.out
        )
    texts = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert b"secret of" not in b"".join(texts)


def test_page_of_a_killed_run_shows_the_available_data(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "killed", steps=3, done=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    (folder / "environment.json").unlink()
    page = Page(write_report(folder))
    assert len(page.sources()) == 4 and "2 of 3" in page.text and "No data" in page.text
    assert len(page.rows["Every step"]) == 3 and "Where it ran" not in page.rows
    (folder / "metrics.jsonl").write_text("")
    page = Page(write_report(folder))
    assert page.sources() == [] and "0 of 3" in page.text


def peaks(stage: str, device: int | None, **processes: int) -> Row:
    measured = {stage: {"device_bytes": device, "processes": processes}}
    return {"kind": "train", "step": 1, "peaks": measured}


def test_plan_is_compared_with_largest_peak_of_every_stage() -> None:
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
    assert measured_peaks(rows).keys() == {"update_actor", "sync_weights"}
    outside = {"assumed": 3 * 2**30, "measured": 2 * 2**30}
    compared = planned_and_measured(rows, {**plan, "outside": outside})
    last = ("outside of tags, at the start", "3.00 GiB", "2.00 GiB", "+50.0 %", "✓")
    assert compared[-1] == last
    alone = planned_and_measured([first], plan)
    assert alone[0] == ("before_an_update", "100.0 MiB", "60.0 MiB", "+66.7 %", "✗")
    assert planned_and_measured(rows, {}) == planned_and_measured([], plan) == []


def test_engines_on_gpus_of_their_own_are_compared_with_their_own_plan() -> None:
    stage = "generate_sequences"
    planned = [
        {"stage": stage, "device_bytes": {"trainer": 100 * MIB, "rollout": 2 * MIB}},
        {"stage": f"{stage} (engine's GPU)", "device_bytes": {"rollout": 50 * MIB}},
    ]
    ranks = {"trainer[0]": 100 * MIB, "rollout[0]": 2 * MIB, "rollout[1]": 50 * MIB}
    row = peaks(stage, 102 * MIB, **ranks)
    row["peaks"][stage]["rollout_device_bytes"] = 49 * MIB
    assert planned_and_measured([row], {"stages": planned, **GPU}) == [
        (stage, "102.0 MiB", "102.0 MiB", "+0.0 %", "✓"),
        ("– trainer", "100.0 MiB", "100.0 MiB", "+0.0 %", "✓"),
        ("– rollout", "2.0 MiB", "2.0 MiB", "+0.0 %", "✓"),
        (f"{stage} (engine's GPU)", "50.0 MiB", "49.0 MiB", "+2.0 %", "✓"),
        ("– rollout", "50.0 MiB", "50.0 MiB", "+0.0 %", "✓"),
    ]


def test_report_of_a_folder_without_a_run_fails_in_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").touch()  # of a project, not of a run
    for words, option in (["report"], "report"), (["run", "--resume"], "--resume"):
        assert main([*words, str(tmp_path)]) == 2
        rule = "holds no run (no metrics.jsonl); give the folder that memsaver run printed"
        assert capsys.readouterr().err == f"memsaver: {option} {tmp_path}: {rule}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


def test_report_without_output_folder_or_matplotlib_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"steps": 1}))
    (tmp_path / "metrics.jsonl").touch()
    nowhere = "--out .*: cannot be written: No such file or directory; name a place"
    with pytest.raises(RecipeError, match=nowhere):
        write_report(tmp_path, tmp_path / "no" / "where.html")
    monkeypatch.setitem(__import__("sys").modules, "recipes.logs.pictures", None)
    with pytest.raises(RecipeError, match=r"pip install 'memsaver\[plots\]'"):
        write_report(tmp_path)


# ---------------------------------------------------------------- pictures


def event(time: float, tag: str, mib: int, backup: int = 0) -> Event:
    sizes = {"committed_bytes": mib * MIB, "backup_bytes": backup * MIB}
    return Event(time=time, seconds=0.0, op="resume", tag=tag, **sizes)


DRAWN = traced(
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


def functions(**means: float) -> Row:
    return {"rewards": {name: {"mean": mean, "std": 0.1} for name, mean in means.items()}}


def test_panels_have_a_curve_for_each_reward_function_and_evaluation() -> None:
    later = functions(right=0.0) | {"reward": float("nan"), "mismatch_max": 0.0}
    rows = [
        eval_row(0, 0.25),
        train_row(1, **functions(right=0.5, brief=0.25)),
        train_row(2, **functions(right=0.75, brief=1500.0)),
        train_row(3, **later),
        eval_row(3, 0.5, correct_hard=0.125, **{"avg@2": 0.5, "pass@1": 0.5, "pass@16": 0.75}),
    ]
    panels = {panel.title: panel for panel in panels_of(rows)}
    assert panels["Reward functions"].courses() == {
        "right": "fell from 0.5 to 0 between steps 1 and 3; highest 0.75 at step 2.",
        "brief": "rose from 0.25 to 1,500 between steps 1 and 2.",
    }
    assert panels["Reward"].curves == {"reward": [(1, 0.1), (2, 0.2)]}
    answers = panels["Correct and cut-off answers"]
    shares = ["correct", "correct, held-out", "correct_hard, held-out", "pass@16, held-out"]
    assert list(answers.curves) == shares
    assert answers.courses()["pass@16, held-out"] == "was 0.75 at step 3."
    figure = draw_curves(list(panels.values()))
    assert [len(axes.lines) for axes in figure.axes] == [1, 2, 4, 1, 2]
    assert len({line.get_linestyle() for line in figure.axes[2].lines}) == 4
    assert figure.axes[4].lines[1].get_xydata().tolist() == [[1, 1e-5], [2, 1e-5]]
    for value, has_panel in ((0.5, True), (0.1, False)):  # The reward is 0.1.
        alone = panels_of([train_row(1, **functions(_right=value))])
        assert ("Reward functions" in {panel.title for panel in alone}) == has_panel
        labels = draw_curves(alone).axes[has_panel].get_legend_handles_labels()[1]
        assert len(labels) == 1, "matplotlib leaves out labels that begin with _"


def test_memory_picture_shows_first_device_with_bytes_held_before_the_step() -> None:
    figure = draw_memory(DRAWN)
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
    assert traced(steps).one_step() == steps[1]
    assert traced([*steps, Span("save_checkpoint", 3.0, 4.0)]).one_step() == steps[0]
    assert traced([steps[0], Span("evaluate", 0.5, 1.0)]).one_step() == steps[0]
    assert traced([Span("build", 0.0, 1.0)]).one_step() is None


def test_areas_differ_by_hatch_as_well_as_by_color() -> None:
    tags = ["weights", "kv_cache", "cuda_graph", "params", "optim", "torch", "contexts"]
    for key in ("hatch", "facecolor"):
        assert len({look[key] for look in list(looks(tags[:5]).values())}) == 5
    both = {(look["hatch"], look["facecolor"]) for look in looks(tags).values()}
    assert len(both) == len(tags) and looks(["optim"]) == {"optim": looks(tags)["optim"]}


def test_run_without_steps_has_no_pictures_and_run_with_zero_mismatch_has(
    tmp_path: Path,
) -> None:
    """Include a mismatch of 0, which a logarithmic axis cannot show."""
    write_pictures([], traced([Span("build", 0.0, 1.0)]), tmp_path)
    assert list(tmp_path.iterdir()) == []
    spans = [Span("something_new", 0.5, 1.5), Span("step 1", 0.0, 2.0)]
    rows = [train_row(1, mismatch_mean=0.0, mismatch_max=0.0)]
    events = {"rollout": [event(1.0, "new_tag", 1)]}
    write_pictures(rows, traced(spans, events), tmp_path)
    for name in ("reward.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
