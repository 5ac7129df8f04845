"""Run folders: one run at a time, full disks, killed runs, complete checkpoints, traces."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recipes
from memsaver import Event
from recipes.logs import environment as environments
from recipes.logs.metric_rows import json_lines, whole_rows
from recipes.logs.monitor import Monitor
from recipes.logs.run_folder import RunFolder, at_work, new_folder
from recipes.logs.stage_trace import Span, StageTrace
from recipes.logs.view import ProgressView
from recipes.run import continue_run
from tests.helpers.memsaver.savers import at_once
from tests.helpers.recipes.run_folders import eval_row, train_row
from tests.helpers.recipes.whole_saves import save

RECIPE = recipes.load("tiny")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", RECIPE)


def fill(path: Path) -> None:
    path.mkdir()
    (path / "state").write_text("x")


def test_new_folder_in_a_ray_working_dir_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "working_dir_files" / "_ray_pkg_0123456789abcdef" / "runs" / "tiny"
    rule = "working_dir, which Ray deletes; give a folder on shared storage"
    with pytest.raises(recipes.RecipeError, match=rule), new_folder(inside, "tiny"):
        pass
    assert not inside.exists()


def test_new_folder_is_removed_unless_the_run_writes_its_first_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "one"
    with pytest.raises(KeyError), new_folder(path, "tiny"):
        (path / "model").mkdir()
        raise KeyError
    assert not path.exists()
    path.mkdir()  # An empty folder is accepted, also the working folder.
    monkeypatch.chdir(path)
    with pytest.raises(KeyError), new_folder(Path(), "tiny"):
        RunFolder.create(path, RECIPE)
        raise KeyError
    written = {entry.name for entry in path.iterdir()}
    assert written == {".lock", "recipe.yaml", "environment.json", "metrics.jsonl"}
    here, link = tmp_path / "here", tmp_path / "link"
    here.mkdir()
    link.symlink_to(here)
    for name in (link, here, Path("../here")):  # Its users keep their working folder.
        monkeypatch.chdir(tmp_path if name is link else here)
        with pytest.raises(KeyError), new_folder(name, "tiny") as made:
            (made / "model").mkdir()
            raise KeyError
        here.mkdir(exist_ok=name is not link)
        assert not [*here.iterdir()] and Path.cwd().exists()


def test_new_folder_is_refused_in_one_line_if_it_cannot_be_created(folder: RunFolder) -> None:
    file = folder.path / "metrics.jsonl"
    wrong = {
        folder.path: f"already holds a run; use --resume {folder.path}, or another folder",
        folder.path.parent: "is no empty folder; give another folder",
        file / "run": "Not a directory; give another folder",
        Path("/proc/1/x"): "give another folder",
    }
    for path, rule in wrong.items():
        refused = pytest.raises(recipes.RecipeError, match=f"^--run-dir {path}: .*{rule}$")
        with refused, new_folder(path, "tiny"):
            pass


def test_second_run_in_a_locked_folder_is_refused(folder: RunFolder) -> None:
    before = contents(folder.path)
    rule = "another run uses it; wait, or give another folder"
    with at_work(folder.path):
        with pytest.raises(recipes.RecipeError, match=rule), at_work(folder.path):
            pass
        with pytest.raises(recipes.RecipeError, match=rule):
            continue_run(folder.path)
    with at_work(folder.path):
        assert contents(folder.path) == before


@pytest.mark.parametrize(
    "name", [".lock", ".recipe.yaml.partial", "metrics.jsonl", "samples.jsonl"]
)
def test_links_in_the_folder_are_not_followed(name: str, tmp_path: Path) -> None:
    path, mine = tmp_path / "run", tmp_path / "mine"
    path.mkdir()
    mine.write_text("a year's work")
    (path / name).symlink_to(mine)
    with contextlib.suppress(recipes.RecipeError, recipes.RunError), at_work(path):
        folder = RunFolder(path) if "jsonl" in name else RunFolder.create(path, RECIPE)
        folder.add_row(train_row(1), [{"kind": "train", "step": 1}])
    assert mine.read_text() == "a year's work"


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    rule = r"belongs to user \d+, not to \d+; give another folder; nothing was written"
    with pytest.raises(recipes.RecipeError, match=rule), at_work(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_new_folder_is_never_shared_by_concurrent_failing_runs(tmp_path: Path) -> None:
    inside, most, begun = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, begun
        for _ in range(200):
            with contextlib.suppress(recipes.RecipeError), new_folder(tmp_path / "run", "tiny"):
                inside += 1
                most, begun = max(most, inside), begun + 1
                time.sleep(0)
                inside -= 1

    at_once(*[work] * 4)
    assert most == 1 and begun > 4


def test_runs_starting_in_the_same_second_get_numbered_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    numbered = []

    def work() -> None:
        with new_folder(None, "tiny") as path:
            RunFolder.create(path, RECIPE)
            numbered.append(path.name)

    at_once(*[work] * 4)
    names = ["tiny-now", "tiny-now-2", "tiny-now-3", "tiny-now-4"]
    assert sorted(numbered) == names == sorted(path.name for path in (tmp_path / "runs").iterdir())


def contents(path: Path) -> dict[str, bytes]:
    return {
        entry.name: entry.read_bytes()
        for entry in path.iterdir()
        if entry.is_file() and entry.name[0] != "."
    }


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Limit the size of every file to `room` bytes inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_raises_one_error_and_damages_no_file(folder: RunFolder) -> None:
    rows = [train_row(step) for step in range(1, 40)]
    for row in rows:
        folder.add_row(row)
    save(folder.checkpoints, 30, 1, fill)
    before = contents(folder.path)
    with full_disk(len(before["recipe.yaml"]) // 2):
        with pytest.raises(
            recipes.RunError, match="folder failed: .*too large; correct that, then continue with"
        ):
            RunFolder.reopen(folder.path, RECIPE)
        with pytest.raises(
            recipes.RunError, match="folder failed: .*too large; correct that, then start again"
        ):
            RunFolder.create(folder.path.with_name("another"), RECIPE)
    assert contents(folder.path) == before and recipes.load(folder.path / "recipe.yaml") == RECIPE
    with full_disk(len(before["metrics.jsonl"]) + 10):
        with pytest.raises(
            recipes.RunError,
            match="writing metrics.jsonl failed: .*too large; correct that, then continue with",
        ):
            folder.add_row(train_row(40))
    assert RunFolder.reopen(folder.path, RECIPE).rows() == rows[:30]


def test_row_whose_samples_do_not_fit_the_disk_is_not_written(folder: RunFolder) -> None:
    samples = [{"kind": "train", "step": step, "completion": "x" * 1000} for step in (1, 2)]
    folder.add_row(train_row(1), samples[:1])
    size = (folder.path / "samples.jsonl").stat().st_size
    with full_disk(size + 500):
        with pytest.raises(recipes.RunError, match="writing samples.jsonl failed: .*too large"):
            folder.add_row(train_row(2), samples[1:])
    assert (folder.path / "samples.jsonl").stat().st_size == size + 500
    assert [row["step"] for row in whole_rows(folder.path / "metrics.jsonl")] == [1]
    assert whole_rows(folder.path / "samples.jsonl") == samples[:1]


def test_failed_checkpoint_does_not_become_latest_and_newest_are_kept(
    folder: RunFolder,
) -> None:
    save(folder.checkpoints, 2, 2, fill)

    def fail(path: Path) -> None:
        path.with_name(path.name + ".partial").mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failed = "checkpoint of step 4 failed: .*No space left.*; free disk space, then continue with"
    with pytest.raises(recipes.RunError, match=failed):
        save(folder.checkpoints, 4, 2, fail)
    assert folder.checkpoints.newest().name == "step_2"
    assert (folder.checkpoints.newest() / "state").read_text() == "x"
    folder.checkpoints.newest().with_name(
        "step_14"
    ).mkdir()  # left by a run killed before writing `latest`
    for step in (5, 10, 12):  # The partial checkpoint of the failure goes.
        save(folder.checkpoints, step, 2, fill)
    kept = folder.checkpoints.newest().parent.glob("step_*")
    assert {path.name for path in kept} == {"step_10", "step_12", "step_14"}
    assert folder.checkpoints.done == 12


def test_checkpoint_becomes_latest_when_it_is_written(folder: RunFolder) -> None:
    """Ask twice, begin the next one, which waits for it, and mark that one as the best."""
    checkpoints, answers = folder.checkpoints, list[bool]()

    def finish(wait: bool) -> bool:
        answers.append(wait)
        return wait or len(answers) == 5

    checkpoints.begin(2, 1, fill, finish)
    assert not checkpoints.complete(wait=False) and not checkpoints.exist
    checkpoints.begin(4, 1, fill, finish)
    assert checkpoints.newest().name == "step_2" and answers == [False, True]
    checkpoints.mark_best(2, 1)
    assert answers == [False, True], "another checkpoint is the best"
    checkpoints.mark_best(4, 1)
    assert checkpoints.newest().name == "step_4" and answers == [False, True, True]
    checkpoints.begin(6, 1, fill, finish)
    assert not checkpoints.complete(wait=False) and checkpoints.complete(wait=False)
    assert checkpoints.newest().name == "step_6" and checkpoints.complete() and len(answers) == 5


def test_checkpoint_whose_writing_fails_leaves_the_older_one(folder: RunFolder) -> None:
    def fail(wait: bool) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(folder.checkpoints, 2, 2, fill)
    folder.checkpoints.begin(4, 2, lambda path: None, fail)
    failed = "checkpoint of step 4 failed: .*No space left.*; free disk space, then continue with"
    with pytest.raises(recipes.RunError, match=failed):
        folder.checkpoints.complete(wait=False)
    assert folder.checkpoints.complete() and folder.checkpoints.newest().name == "step_2"


@pytest.mark.parametrize(
    ("checkpoint", "kept"), [(2, 4), (0, 1)], ids=["from a checkpoint", "from the start"]
)
def test_reopen_drops_rows_after_the_checkpoint(
    checkpoint: int, kept: int, folder: RunFolder
) -> None:
    rows = [eval_row(0, 0.5), train_row(1), train_row(2), eval_row(2, 0.5), train_row(3)]
    for row in rows:
        folder.add_row(row)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')  # killed while writing
    if checkpoint:
        save(folder.checkpoints, checkpoint, 1, fill)
    (folder.path / "trace.json").write_text("old")
    again = RunFolder.reopen(folder.path, RECIPE)
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert again.rows() == [json.loads(line) for line in lines] == rows[:kept]
    assert (folder.path / f"trace-until-step-{checkpoint}-1.json").read_text() == "old"


def test_trace_of_a_short_run_has_its_stages_and_bytes(tmp_path: Path) -> None:
    trace, file = StageTrace(), tmp_path / "trace.json"
    trace.write(file)
    assert json.loads(file.read_text())["traceEvents"] == []
    trace.spans.append(Span("build", 1.0, 2.0))
    sizes = {"committed_bytes": 2**19, "backup_bytes": 0}
    trace.events["rollout"].append(
        Event(time=1.5, seconds=0.01, op="resume", tag="something_new", **sizes)
    )
    trace.write(file)
    entries = json.loads(file.read_text())["traceEvents"]
    names = {entry["name"] for entry in entries if entry["ph"] == "X"}
    assert names == {"build", "resume something_new"}
    assert [entry["args"] for entry in entries if entry["ph"] == "C"] == [{"committed": 2**19}]


def test_long_run_keeps_the_newest_steps_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.logs.stage_trace.KEPT", 20)
    trace = StageTrace()
    for step in range(1, 500):
        for name in ("generate_sequences", f"step {step}"):
            trace.spans.append(Span(name, step, step + 1.0))
        sizes = {"committed_bytes": 2**19, "backup_bytes": 0}
        event = Event(time=step + 0.5, seconds=0.01, op="resume", tag="params", **sizes)
        trace.events["rollout"].append(event)
    assert len(trace.spans) == len(trace.events["rollout"]) == 20
    newest = trace.one_step()
    assert newest is not None and newest.name == "step 499"


def test_missing_matplotlib_is_noted_and_the_trace_is_written(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "recipes.logs.pictures", None)
    Monitor(folder, ProgressView(steps=1)).close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no pictures: ") and line.endswith("pip install 'memsaver[plots]'")
    assert (folder.path / "trace.json").exists()


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, **gpus: str) -> None:
    """Let nvidia-smi list GPUs by their ids, those that `-i` selects, or fail."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ids = command[command.index("-i") + 1].split(",") if "-i" in command else [*gpus]
        if not {*ids} <= gpus.keys():
            raise subprocess.CalledProcessError(6, command)
        listed = "".join(f"{gpus[name]}\n" for name in ids)
        return subprocess.CompletedProcess(command, 0, listed)

    monkeypatch.setattr(environments.subprocess, "run", run)


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ["A, 80 GiB", "B, 80 GiB"]),
        ("", []),
        ("-1", []),
        ("1, 0", ["B, 80 GiB", "A, 80 GiB"]),
        ("MIG-5e6f", ["MIG-5e6f"]),
    ],
)
def test_environment_lists_only_visible_gpus(
    variable: str | None, visible: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(monkeypatch, **{"0": "A, 80 GiB", "1": "B, 80 GiB"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert environments.describe_environment()["gpus"] == visible


def test_environment_is_recorded_and_kept_over_a_resume(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = json.loads((folder.path / "environment.json").read_text())
    public = torch.__version__.partition("+")[0]  # A wheel may omit the local version.
    assert environment["cpus"] >= 1 and environment["packages"]["torch"].partition("+")[0] == public
    fake_nvidia_smi(monkeypatch, **{"0": "NVIDIA H100 80GB HBM3, 81559 MiB, 580.95.05"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    RunFolder.reopen(folder.path, RECIPE)
    assert json.loads((folder.path / "environment.json").read_text())["gpus"] == [
        "NVIDIA H100 80GB HBM3, 81559 MiB, 580.95.05"
    ]
    assert json.loads((folder.path / "environment-until-step-0-1.json").read_text()) == environment


def test_rows_of_before_are_read_under_present_names_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keep the values of a reward function that is itself named exact_match."""
    old = {
        "exact_match": 0.5, "exact_match_b": 0.25, "sets": {"b": {"exact_match": 1.0}},
        "rewards": {"exact_match": {"mean": 0.1}}, "unequal_tokens": 0,
    }  # fmt: skip
    file = tmp_path / "metrics.jsonl"
    file.write_text(json_lines([old, old]))
    row = {
        "correct": 0.5, "correct_b": 0.25, "sets": {"b": {"correct": 1.0}},
        "rewards": old["rewards"], "unequal_tokens": 0,
    }  # fmt: skip
    assert whole_rows(file) == [row, row]
    line = f"memsaver: {file}: what its rows call exact is read as correct\n"
    assert capsys.readouterr().err == line
    file.write_text(json_lines([{"exact": True, "figures": {"exact": 1.0}}]))
    assert whole_rows(file) == [{"correct": True, "figures": {"exact": 1.0}}]
