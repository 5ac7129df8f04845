"""`make bench-sync` at tiny sizes on the CPU: every case runs through its own checks, and these notice a fault."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.benchmarks import bench_sync
from tests.benchmarks.sync import rivals_ipc
from tests.benchmarks.sync.base import Figure, Rates, Scale, check, make_scale, make_source, make_target
from tests.benchmarks.sync.processes import Call, CaseFailed, alone, pairs, run_all
from tests.benchmarks.sync.shapes import qwen_shapes

CPU = torch.device("cpu")
SCALE = make_scale(on_gpu=False, tiny=True)


def test_the_script_runs_every_case_prints_a_table_and_saves_it(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one GPU the cases of two are left out."""
    on_gpu = device != "cpu"
    if not on_gpu:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    groups = ["one"] if torch.cuda.device_count() == 1 else ["one", "two"]
    bench_sync.main(["--tiny", "--cases", *groups, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| IPC buckets | float32 -> bfloat16, 0.00 G: buckets of " in printed
    assert "memsaver: skipped, it has no tiny form" in printed and (on_gpu or "checkpoint-engine: skipped" in printed)
    saved = json.loads((tmp_path / "bench_sync.json").read_text())
    counts = {
        "one": {"floors": 2, "copies": 6 if on_gpu else 4, "IPC tensors": 2, "IPC buckets": 2},
        "two": {"floors": 8, "all-gather": 1, "replicas": 5},
    }
    for group in groups:
        assert counts[group].items() <= {name: len(each) for name, each in saved[group]["results"].items()}.items()
        assert all(
            each["ms"] > 0 and each["floor_ms"] > 0 for case in saved[group]["results"].values() for each in case
        )


def test_without_a_gpu_only_tiny_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="no GPU"):
        bench_sync.main([])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="need two"):
        bench_sync.main(["--cases", "replicas"])


def test_a_case_that_fails_costs_no_other_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(scale: Scale) -> list[Figure]:
        raise ZeroDivisionError

    monkeypatch.setattr(bench_sync.floors, "rates", lambda scale, gpus: (Rates(copy=1.0), []))
    monkeypatch.setitem(bench_sync.ONE, "IPC tensors", fail)
    monkeypatch.setitem(bench_sync.ONE, "IPC buckets", lambda scale: [Figure(what="it", ms=1.0)])
    done = bench_sync.measure("one", ["IPC tensors", "IPC buckets"], SCALE)
    assert done.failed == ["IPC tensors"] and [each.what for each in done.results["IPC buckets"]] == ["it"]


@pytest.mark.parametrize("source", SCALE.sources, ids=str)
def test_the_check_names_the_first_parameter_that_differs(source: rivals_ipc.Source) -> None:
    target = make_target(source, CPU)
    for name, tensor in make_source(source, CPU).items():
        target[name].copy_(tensor)
    check(target, source)
    target["lm_head.weight"].view(torch.int16)[-1, -1] ^= 1
    with pytest.raises(AssertionError, match="lm_head.weight was not synced"):
        check(target, source)
    del target["model.norm.weight"]
    with pytest.raises(AssertionError, match="other parameters"):
        check(target, source)


def lose_one(pipe: Connection, scale: Scale, tensors: dict[str, Tensor]) -> rivals_ipc.Row:
    """All parameters but the last."""
    return rivals_ipc._send_each(pipe, scale, dict(list(tensors.items())[:-1]))


def shift(pipe: Connection, scale: Scale, tensors: dict[str, Tensor]) -> rivals_ipc.Row:
    """The first one's values, moved by one."""
    first = next(iter(tensors))
    return rivals_ipc._send_buckets(pipe, scale, {**tensors, first: tensors[first].roll(1)})


@pytest.mark.parametrize(("send", "name"), [(lose_one, "lm_head.weight"), (shift, "model.embed_tokens.weight")])
def test_the_ipc_rivals_notice_what_did_not_come(send: rivals_ipc.Send, name: str) -> None:
    with pytest.raises(CaseFailed, match=f"{name} was not synced"):
        rivals_ipc._measure("broken", send, SCALE, SCALE.sources[0])


def test_buckets_hold_every_parameter_once_and_no_more_than_they_can() -> None:
    shapes = qwen_shapes("7b")
    parts = list(rivals_ipc.split(shapes, 2 << 30))
    assert [name for names in parts for name in names] == list(shapes) and len(parts) == 8
    sizes = [sum(torch.Size(shapes[name]).numel() * 2 for name in names) for names in parts]
    assert max(sizes) <= 2 << 30
    assert list(rivals_ipc.split({"a": (4,), "b": (100,), "c": (2,), "d": (2,)}, 8)) == [["a"], ["b"], ["c", "d"]]


def test_a_floor_is_the_larger_of_both_ways() -> None:
    rates = Rates(copy=1000.0, link=10.0)
    assert Figure(what="", ms=0.0, copied=500, linked=1).floor_ms(rates) == 500.0
    assert Figure(what="", ms=0.0, copied=500, linked=8).floor_ms(rates) == 800.0


# ---------------------------------------------------------------- processes


def die(pipe: Connection, number: int) -> None:
    os._exit(3)


def hang(pipe: Connection, number: int) -> None:
    pipe.poll(60)


def fail(pipe: Connection, number: int) -> None:
    raise ZeroDivisionError("it was I")


def answer(pipe: Connection, number: int) -> int:
    pipe.send(number + 10)
    return int(pipe.recv())


def test_pairs_talk_and_what_they_return_comes_back_in_order() -> None:
    assert pairs(answer, answer, seconds=30, count=2) == [10, 11, 10, 11]
    assert alone(os.getpid, seconds=30) != os.getpid()


@pytest.mark.parametrize(("other", "says"), [(die, "process 0 has died"), (fail, "process 0 failed:(.|\n)*it was I")])
def test_a_failure_ends_the_process_that_waits_for_it(other: object, says: str) -> None:
    started = time.monotonic()
    with pytest.raises(CaseFailed, match=says):
        pairs(other, hang, seconds=50)  # type: ignore[arg-type]
    assert time.monotonic() - started < 20


def test_a_case_without_an_answer_ends_in_time() -> None:
    with pytest.raises(CaseFailed, match=r"no answer of processes \[1\] for 1 s"):
        run_all([Call(os.getpid, ()), Call(time.sleep, (60,))], 1)
