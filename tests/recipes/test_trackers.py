"""Trackers: names, what the libraries get, and delivery of every row exactly once."""

from __future__ import annotations

import html
import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import markdown as python_markdown
import markdown_it
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes
from recipes.cli import main
from recipes.logs import delivery
from recipes.logs.delivery import Trackers
from recipes.logs.metric_rows import json_lines, whole_rows
from recipes.logs.recorded_samples import COLUMNS, read_samples
from recipes.logs.run_folder import RunFolder, new_folder
from recipes.logs.trackers import (
    Tracker,
    figures_of,
    make_tracker,
    plain_text,
    samples_table,
)
from recipes.run import continue_run, start_run
from tests.helpers.peers import Peer
from tests.helpers.ports import free_port
from tests.helpers.ray_cluster import until
from tests.helpers.recipes.run_folders import eval_row, train_row
from tests.helpers.recipes.tiny_runs import SMALL, rows, without_pictures
from tests.helpers.recipes.whole_saves import save

ROWS = [eval_row(0, 0.0), train_row(1), train_row(2), eval_row(2, 0.5), train_row(3)]
SAMPLE = {
    "kind": "eval", "step": 0, "set": "toy", "prompt": "first of a b", "answer": "a",
    "completion": "b | <script>\nb", "reward": 0.0, "correct": False, "finish_reason": "stop",
    "tokens": 2,
}  # fmt: skip


class Memory(Tracker):
    """Tracker that remembers its calls; `fail` may raise before a call is remembered."""

    def __init__(self, fail: Callable[[int], None] = lambda step: None) -> None:
        self.fail = fail
        self.begun: list[str | None] = []
        self.logged: list[tuple[int, list[str]]] = []
        self.tables: list[tuple[int, int]] = []
        self.closed = 0

    def start(
        self, name: str, folder: Path, config: Mapping[str, Any], run_id: str | None = None
    ) -> str | None:
        self.begun.append(run_id)
        return run_id or f"{name}'s own"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.fail(step)
        self.logged.append((step, list(figures)))

    def table(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        self.tables.append((step, len(samples)))

    def close(self) -> None:
        self.closed += 1

    def places(self) -> list[tuple[int, bool]]:
        return [(step, names[0].startswith("eval/")) for step, names in self.logged]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tracker], list[str]]:
    """Make the recipe's tracker `mine:make` the given one."""

    def put(tracker: Tracker) -> list[str]:
        module = SimpleNamespace(make=lambda: tracker)
        monkeypatch.setitem(sys.modules, "mine", module)  # type: ignore[arg-type]
        return ["mine:make"]

    return put


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "must be one of tensorboard, wandb, trackio, .*, or my_trackers.py:function"),
        ("prometheus:port", "prometheus:PORT"),
        ("prometheus:70000", "prometheus:PORT"),
        ("nowhere:make", "cannot import nowhere: .*; run in the folder of the module"),
        ("json:dumps", "raised TypeError: .*; correct it"),
        ("builtins:list", "returned a list; return a recipes.logs.trackers.Tracker"),
        ("trackio", "No module named 'trackio'; run: pip install trackio"),
    ],
)
def test_wrong_tracker_is_refused_before_anything_is_written(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(recipes.RecipeError, match=f"^trackers={name}: .*{message}"):
        make_tracker(name)
    words = ["run", "tiny", f"trackers=[{name}]", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 2 and not (tmp_path / "run").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_library_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in {"tensorboard": "tensorboard", "prometheus": "prometheus-client"}.items():
        monkeypatch.delattr("torch.utils.tensorboard", raising=False)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(recipes.RecipeError, match=f"; run: pip install {package}$"):
            make_tracker(name)


def test_tracker_that_cannot_start_leaves_no_folder_and_closes_the_others(
    use: Any, tmp_path: Path
) -> None:
    refuses, other = Memory(), Memory()
    refuses.start = lambda *_: 1 / 0  # type: ignore[method-assign]
    use(refuses)
    sys.modules["mine"].other = lambda: other  # type: ignore[attr-defined]
    rule = "cannot start: ZeroDivisionError: division by zero; correct that, or drop it"
    with pytest.raises(recipes.RecipeError, match=f"^trackers=mine:make: {rule}"):
        with (
            new_folder(tmp_path / "run", "tiny") as path,
            Trackers(["mine:other", "mine:make"]) as t,
        ):
            t.start(path, {})
    assert other.closed == 1 and not (tmp_path / "run").exists()


# ---------------------------------------------------------------- what trackers get


def test_figures_are_all_numbers_of_a_row_by_path() -> None:
    row = train_row(3, sync={"seconds": 0.5}, reward=None, note="x", peaks={"a": {"b[0]": 7}})
    figures = figures_of(row)
    assert figures["stages/update_actor"] == 0.24 and figures["sync/seconds"] == 0.5
    assert figures["peaks/a/b[0]"] == 7.0 and figures["correct"] == pytest.approx(0.15)
    assert not {"step", "kind", "reward", "note"} & set(figures)
    assert figures_of(eval_row(2, 0.5)) == {"eval/correct": 0.5, "eval/problems": 16.0}


TEXTS = st.lists(
    st.sampled_from(
        ["<script>", "[a](http://b.c)", "![a](//b)", "`", "|", "\\", "*a*", "\r", "\n", "&lt;"]
    )
    | st.sampled_from(["www.b.c", "a@b.c", "<http://b>", "=HYPERLINK(1)", "-1", "__", "$x$", "#"])
    | st.text(max_size=3)
).map("".join)


@given(TEXTS, st.sampled_from([str.lower, str.upper]))
def test_answer_in_a_table_of_a_tracker_is_text_only(
    text: str, cased: Callable[[str], str]
) -> None:
    """Render by two Markdown libraries, and read the text back, but for control characters."""
    text = "".join(c for c in cased(text) if c.isprintable() or c in "\r\n")
    table = samples_table([{**SAMPLE, "completion": f"a{text}b"}])
    ours = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(table)
    for page in (ours, python_markdown.markdown(table, extensions=["tables"])):
        assert {*re.findall(r"<(\w+)", page)} <= {"table", "thead", "tbody", "tr", "th", "td", "br"}
        cell = re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)[COLUMNS.index("completion")]
        shown = html.unescape(re.sub(r"<br ?/?>\n?", "\n", cell)).replace("\u200b", "")
        lines = re.sub(r"\r\n|\r", "\n", text).replace("\u200b", "")
        assert shown == f"a{lines}b"
        assert not re.search(r"(?i)://|www\.|a@b", html.unescape(page))


@pytest.mark.parametrize("start", ["", " ", "\t", "\n"])
@pytest.mark.parametrize("text", ["=1+1", "@SUM(1)", "+cmd|' /C calc'!A0", "-2+3", "＝1"])
def test_answer_in_a_table_is_no_formula_of_a_spreadsheet(start: str, text: str) -> None:
    assert plain_text(start + text)[0] == "'"
    assert [plain_text(number) for number in ("-3", "+1.5e-3", -2.5)] == ["-3", "+1.5e-3", "-2.5"]


def deliver(folder: Path, names: list[str], session: Sequence[Mapping[str, Any]] = ROWS) -> None:
    """Deliver rows to trackers as a run does, with a sample for each evaluation."""
    with Trackers(names) as trackers:
        trackers.start(folder, {"model": {"shape": None}, "steps": 3, "words": ["a", "b"]})
        (folder / "metrics.jsonl").write_text(json_lines(session))
        for row in session:
            sample = {**SAMPLE, "step": row["step"]}
            trackers.add(dict(row), [sample] if row["kind"] == "eval" else [])


def test_tensorboard_reads_back_every_figure_once_over_two_sessions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    deliver(tmp_path, ["tensorboard"], ROWS[:3])
    deliver(tmp_path, ["tensorboard"], ROWS[1:])
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward")] == [
        (1, 0.1), (2, 0.2), (3, 0.3),
    ]  # fmt: skip
    assert [e.step for e in events.Scalars("eval/correct")] == [0, 2]
    assert [e.step for e in events.Scalars("stages/update_actor")] == [1, 2, 3]
    tables = events.Tensors("samples/eval/text_summary")
    assert [e.step for e in tables] == [0, 2]
    assert b"first of a b" in tables[0].tensor_proto.string_val[0]
    recipe = events.Tensors("recipe/text_summary")
    assert len(recipe) == 1 and b'"steps": 3' in recipe[0].tensor_proto.string_val[0]


def log_records(data: bytes, begin: int) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, whose blocks have 32 KiB."""
    at, record = 0, b""
    while at < len(data):
        if (left := -(at + begin) % 2**15) and left < 7:  # the rest of a block is padding
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part
            yield record
            record = b""


def test_wandb_gets_rows_of_two_sessions_under_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the files of the real library in its offline mode."""
    from wandb.proto.wandb_internal_pb2 import Record

    variables = {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "PROJECT": "mine"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    deliver(tmp_path, ["wandb"], ROWS[:3])
    # Two offline sessions of one second would share their folder.
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "z"))
    (tmp_path / "z").mkdir()
    deliver(tmp_path, ["wandb"], ROWS[2:])

    def records() -> list[Any]:
        """Read the records of both sessions; the library ends to write after it returns."""
        files = [file.read_bytes() for file in sorted(tmp_path.glob("**/offline-run-*/*.wandb"))]
        parts = [map(Record.FromString, log_records(data[7:], 7)) for data in files]
        return list(itertools.chain.from_iterable(parts))

    def kinds() -> list[str]:
        return [record.WhichOneof("record_type") for record in records()]

    until(lambda: kinds().count("exit") == 2)
    steps: dict[str, list[str]] = {"reward": [], "eval/correct": [], "samples/eval": []}
    for record in records():
        items = {[*item.nested_key, item.key][0]: item for item in record.history.item}
        for name in steps.keys() & items.keys():
            steps[name].append(items["step"].value_json)
    assert steps == {
        "reward": ["1", "2", "3"], "eval/correct": ["0", "2"], "samples/eval": ["0", "2"],
    }  # fmt: skip
    runs = [record.run for record in records() if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("mine", tmp_path.name)}
    (run_id,) = {run.run_id for run in runs}
    (entry,) = whole_rows(tmp_path / "trackers.jsonl")
    assert (entry["tracker"], entry["run_id"]) == ("wandb", run_id)


def test_mlflow_gets_rows_of_two_sessions_under_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a store of files, which needs no server and no database."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    first = {**ROWS[1], "peaks": {"sync": {"trainer[0]": 7}}}
    deliver(tmp_path, ["mlflow"], [ROWS[0], first, ROWS[2]])
    deliver(tmp_path, ["mlflow"], ROWS)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])

    def steps(name: str) -> list[int]:
        return [metric.step for metric in client.get_metric_history(run.info.run_id, name)]

    assert steps("reward") == [1, 2, 3] and steps("eval/correct") == [0, 2]
    assert steps("peaks/sync/trainer_0_") == [1]
    assert run.info.status == "FINISHED" and run.info.run_name == tmp_path.name
    assert run.data.params == {"model.shape": "None", "steps": "3", "words": "['a', 'b']"}
    files = [item.path for item in client.list_artifacts(run.info.run_id, "samples")]
    assert files == ["samples/eval-0.jsonl", "samples/eval-2.jsonl"]


def test_mlflow_retries_for_seconds_unless_its_user_sets_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library's own 7 retries would take 4 minutes, in which a run says nothing."""
    import mlflow.environment_variables as variables

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "x")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")  # The end of the test restores it.
    make_tracker("mlflow")
    assert variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 3
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    make_tracker("mlflow")
    assert variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 5


class LikeWandb:
    """Module with the parts of trackio 0.43 and swanlab 0.10 that are used, as they declare them.

    Neither is installed for tests, because both would bring a whole server or client. Like swanlab,
    a run that begins in the main thread takes SIGINT over, which only this thread can undo.
    """

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logs: list[tuple[dict[str, Any], int]] = []
        self.finished = 0
        self.handler: Any = None

    def trackio(
        self, project: str, name: str | None = None, config: Any = None, resume: str = "never"
    ) -> Any:
        return self._run(project=project, name=name, config=config, resume=resume)

    def swanlab(
        self, *, name: str | None = None, id: Any = None, resume: Any = None, config: Any = None
    ) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.handler = signal.signal(signal.SIGINT, lambda *_: None)
        return self._run(name=name, id=id, config=config, resume=resume)

    def _run(self, **given: Any) -> Any:
        self.inits.append(given)
        run_id = given.get("id") or "drawn"
        return SimpleNamespace(id=run_id, name=given["name"], log=self.log, finish=self.finish)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        self.logs.append((metrics, step))

    def finish(self) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGINT, self.handler)
        self.finished += 1

    def Table(self, *, columns: list[str], data: list[list[str]]) -> Any:
        return [columns, data]

    def Text(self, text: str) -> str:
        return text


@pytest.mark.parametrize("library", ["trackio", "swanlab"])
def test_libraries_with_the_interface_of_wandb_continue_their_run(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = LikeWandb()
    handler = signal.getsignal(signal.SIGINT)
    module.init = getattr(module, library)
    monkeypatch.setitem(sys.modules, library, module)
    deliver(tmp_path, [library], ROWS[:3])
    deliver(tmp_path, [library], ROWS)
    new, continued = module.inits
    assert (new["resume"], continued["resume"]) == ("never", "allow")
    if library == "swanlab":
        assert (new["id"], continued["id"]) == (None, "drawn")
    else:
        assert new["project"] == "memsaver" and new["name"] == continued["name"] == tmp_path.name
    steps = [(step, "reward" in metrics) for metrics, step in module.logs]
    assert [step for step, is_train in steps if is_train] == [1, 2, 3]
    tables = [metrics for metrics, _ in module.logs if "samples/eval" in metrics]
    assert len(tables) == 2 and "first of a b" in str(tables[0]) and module.finished == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_prometheus_serves_the_newest_figures_of_a_run(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    port = free_port()
    page = f"http://localhost:{port}/metrics"
    with Trackers([f"prometheus:{port}"]) as trackers:
        trackers.start(tmp_path, {})
        for row in ROWS:
            memory = {"train": {"params": 8.0 * row["step"]}, "rollout": {"kv_cache:discard": 4}}
            trackers.add({**row, "memory": memory} if row["kind"] == "train" else row)

        def scrape() -> dict[tuple[str, ...], float]:
            with urllib.request.urlopen(page) as answer:
                families = [*text_string_to_metric_families(answer.read().decode())]
            samples = [sample for family in families for sample in family.samples]
            return {(s.name, *s.labels.values()): s.value for s in samples}

        until(lambda: scrape().get(("memsaver_run_figure", "step")) == 3)
        gauges = scrape()
        with pytest.raises(recipes.RecipeError, match=f"cannot start: .*: port {port} cannot be"):
            make = Trackers([f"prometheus:{port}"])
            make.start(tmp_path, {})
    assert gauges["memsaver_run_figure", "reward"] == pytest.approx(0.3)
    assert gauges["memsaver_run_figure", "eval/correct"] == 0.5
    assert gauges["memsaver_run_stage_seconds", "update_actor"] == 0.24
    assert gauges["memsaver_run_tag_bytes", "train", "params"] == 24.0
    with pytest.raises(OSError):
        urllib.request.urlopen(page)


# ---------------------------------------------------------------- delivery


def test_failing_tracker_costs_its_rows_and_two_lines(
    use: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(step: int) -> None:
        if step in (1, 2):
            raise OSError("network\nis down")

    memory = Memory(fail)
    deliver(tmp_path, use(memory))
    assert [step for step, _ in memory.logged] == [0, 3] and memory.closed == 1
    assert capsys.readouterr().out.splitlines() == [
        "tracker mine:make: OSError: network is down; the run continues without such rows",
        "tracker mine:make: not delivered at the end: 3 rows",
    ]


def test_hanging_tracker_ends_the_run_late_but_surely(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    monkeypatch.setattr(delivery, "GRACE", 0.1)
    monkeypatch.setattr(delivery, "MOST_WAITING", 3)
    deliver(tmp_path, use(Memory(lambda step: release.wait(60) and None)))
    release.set()
    text = capsys.readouterr().out
    assert "tracker mine:make: does not answer for 0 s\n" in text
    assert "tracker mine:make: not delivered at the end: 5 rows\n" in text


def test_command_ends_although_the_library_of_a_hanging_tracker_has_a_busy_pool() -> None:
    code = """if True:
        import sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from recipes.cli import main
        pool = ThreadPoolExecutor(1)
        def hang():
            pool.submit(threading.Event().wait).result()
        threading.Thread(target=hang, name="tracker x", daemon=True).start()
        sys.argv = ["memsaver", "recipes"]
        sys.exit(main() + 1)  # not reached
    """
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and "tiny-ppo" in done.stdout


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_row_is_delivered_twice_over_resumes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Compare with the rows of the run that ends; sessions end beyond their last checkpoint.

    A second tracker begins in the last session, and gets the rows that follow its resume.
    """
    draw, path = data.draw, tmp_path_factory.mktemp("run")
    recipe, memory, late = recipes.load("tiny"), Memory(), Memory()
    folder, last = RunFolder.create(path / "run", recipe), 6
    with pytest.MonkeyPatch.context() as patch:
        module = SimpleNamespace(make=lambda: memory, late=lambda: late)
        patch.setitem(sys.modules, "mine", module)  # type: ignore[arg-type]
        for more in [*draw(st.lists(st.integers(1, 4), max_size=3)), last]:
            done = folder.checkpoints.done
            names = ["mine:make", *(["mine:late"] if more == last else [])]
            with Trackers(names) as trackers:
                trackers.start(folder.path, {})
                folder = RunFolder.reopen(folder.path, recipe)
                kept = folder.rows()
                for step in range(done + 1, min(last, done + more) + 1):
                    due = (step - 1) % 2 == 0 and kept[-1:] != [eval_row(step - 1, 0.5)]
                    for row in [*([eval_row(step - 1, 0.5)] if due else []), train_row(step)]:
                        folder.add_row(row)
                        trackers.add(row)
                    if step % 3 == 0:
                        save(folder.checkpoints, step, 1, Path.mkdir)
                if more != last and draw(st.booleans()):  # a restart, in which the run is killed
                    trackers.record()
                    folder = RunFolder.reopen(folder.path, recipe)
    expected = list(map(delivery.position_of, folder.rows()))
    assert memory.places() == expected and late.places() == expected[len(kept) :]
    assert memory.begun == [None, *["run's own"] * (len(memory.begun) - 1)]


def test_trackers_of_a_run_folder_of_before_continue(use: Any, tmp_path: Path) -> None:
    """Read the lines that were written for each row, the last of them half."""
    names = use(memory := Memory())
    lines = [{"run_id": "abc"}, {"kind": "train", "step": 1}, {"kind": "train", "step": 2}]
    text = json_lines({"tracker": "mine:make", **line} for line in lines)
    (tmp_path / "trackers.jsonl").write_text(text + '{"tracker": "mi')
    deliver(tmp_path, names)
    assert memory.begun == ["abc"] and memory.places() == [(2, True), (3, False)]


# ---------------------------------------------------------------- a whole run


class Dying(Tracker):
    """Tracker that kills the process while it delivers step `dies_in`, after a checkpoint."""

    dies_in: int | None = None

    def start(
        self, name: str, folder: Path, config: Mapping[str, Any], run_id: str | None = None
    ) -> str:
        self.file = folder / "mine.txt"
        return "mine"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if step == self.dies_in:
            until((self.file.parent / "checkpoints" / "latest").exists)  # written beside the steps
            os.kill(os.getpid(), signal.SIGKILL)
        with self.file.open("a") as file:
            file.write(f"{'eval' if 'eval/correct' in figures else 'train'} {step}\n")


def train_until_killed(pipe: Connection, folder: Path) -> None:
    Dying.dies_in = 4
    words = [*SMALL, "steps=5", "checkpoint.every=2", "samples=4"]
    with without_pictures():
        start_run("tiny", [*words, f"trackers=[tensorboard,{__name__}:Dying]"], folder)


def test_killed_run_resumes_with_every_step_at_most_once_in_all_records(
    tmp_path: Path, no_pictures: None
) -> None:
    """Kill the process while a tracker takes step 4, two steps or more after a checkpoint.

    Trackers may lack the last rows before the kill.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    killed = Peer(train_until_killed, folder).process
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    written = [delivery.position_of(row) for row in rows(folder)]
    continue_run(folder)
    train, evals = ([row["step"] for row in rows(folder, kind)] for kind in ("train", "eval"))
    assert train == [1, 2, 3, 4, 5] and evals == [0, 2, 4, 5]
    for kind, steps in (("train", train), ("eval", evals)):
        recorded = [s["step"] for s in read_samples(folder) if s["kind"] == kind]
        assert recorded == [step for step in steps for _ in range(4)]
    assert len(whole_rows(folder / "samples.jsonl")) == 4 * (len(train) + len(evals))
    lines = [line.split() for line in (folder / "mine.txt").read_text().splitlines()]
    mine = [(int(step), kind == "eval") for kind, step in lines]
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = [(event.step, False) for event in events.Scalars("reward")]
    shown += [(event.step, True) for event in events.Scalars("eval/correct")]
    new = {delivery.position_of(row) for row in rows(folder)} - {*written}
    for places in (mine, shown):
        assert len(places) == len({*places}) and {*places} >= new
    assert mine == sorted(mine) and (4, False) not in mine
    runs = whole_rows(folder / "trackers.jsonl")
    assert {entry["tracker"]: entry["run_id"] for entry in runs}.popitem()[1] == "mine"
