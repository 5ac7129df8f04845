"""The doctor's findings on this machine, and on machines with problems."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsaver import doctor
from memsaver.compat import IN_PROCESS
from memsaver.doctor import CHECKS, Check, examine, report, run_check
from memsaver.memory.torch_allocator import ALLOCATOR_HOOKS, GRAPH_REGISTER
from memsaver.native import build
from tests.helpers.memory import open_fds, process_bytes, settled_fds
from tests.helpers.memsaver.savers import python, until


def answer(value: object) -> Callable[..., object]:
    return lambda *_: value


def assert_tells(check: Check, status: str, *words: str) -> None:
    assert check.status == status, check
    assert bool(check.remedy) == (status in ("warn", "fail"))
    for word in words:
        assert word in check.finding + " -> " + check.remedy, check


def test_examine_reports_this_machine_and_releases_all_memory() -> None:
    examine("cpu")  # the first run loads libraries
    before = process_bytes("cpu"), settled_fds()
    checks = {check.name: check for check in examine("cpu")}
    # Threads close the connections.
    until(lambda: (process_bytes("cpu"), open_fds()) == before)
    assert list(checks) == list(CHECKS)
    assert {check.status for check in checks.values()} <= {"ok", "skip", "warn"}, checks
    assert [checks[name].status for name in ("versions", "CPU")] == ["ok", "ok"], checks
    release = torch.__version__.split("+")[0]  # the installed metadata may lack the build
    assert f"torch {release}" in checks["versions"].finding
    assert checks["GPU"] == Check("GPU", "skip", "no GPU to examine")


@pytest.mark.gpu
@pytest.mark.alone
def test_examine_tries_gpu_and_releases_all_memory() -> None:
    checks = {check.name: check for check in examine("cuda:0")}
    made = {name: check for name, check in checks.items() if check.finding != "not installed"}
    assert checks.keys() - made.keys() <= {"verl", "TRL"}
    assert {check.status for check in made.values()} <= {"ok", "warn"}, made
    assert_tells(checks["GPU"], "ok", torch.cuda.get_device_name(0), " free of ", "tags work")
    torch.cuda.empty_cache()
    before = process_bytes("cuda:0")
    examine("cuda:0")
    torch.cuda.empty_cache()
    assert process_bytes("cuda:0") - before <= 4 << 20


def test_importing_memsaver_and_doctor_loads_no_heavy_package() -> None:
    heavy = {"cuda", "rich", "triton", "ray", "transformers", "huggingface_hub", "yaml", "pydantic"}
    code = f"import sys, torch; old = set(sys.modules); import memsaver.doctor; print({heavy} & "
    assert python(code + "set(sys.modules) - old)") == "set()"


def test_check_that_raises_fails_without_affecting_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", {"one": broken, "two": answer(("ok", "fine", ""))})
    first, second = examine("cpu")
    assert_tells(first, "fail", "RuntimeError: two lines", "nvidia-smi")
    assert second == Check("two", "ok", "fine")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", torch.device("meta")])
def test_unusable_device_fails_its_check(device: str | torch.device) -> None:
    assert_tells(run_check("GPU", device), "fail")


def test_report_prints_remedies_and_exits_1_only_on_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [Check("one", "ok", "[fine]"), Check("two", "warn", "so so", "do this")]
    monkeypatch.setattr(doctor, "examine", lambda device: checks)
    assert report(None) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "2 checks, 1 needs attention"
    assert "[fine]" in text and "-> do this" in text
    checks.append(Check("three", "fail", "broken", "do that"))
    assert report(None) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 checks, 2 need attention"


LIMITS, NONE = "resource.getrlimit", resource.RLIM_INFINITY
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
SETTINGS = (*SETTINGS, "LD_PRELOAD", IN_PROCESS, GRAPH_REGISTER, *ALLOCATOR_HOOKS)
MEMORY = "memsaver.doctor.available_memory"
GROUP = {"memsaver.doctor.container_memory": answer(SimpleNamespace(limit=1 << 20))}
Case = tuple[str, dict[str, Any], str, tuple[str, ...]]
"""Check, changes to attributes (dotted) or environment variables, status, words of the finding."""
CASES: list[Case] = [
    ("versions", {"importlib.metadata.version": answer("2.9.1+cu126")}, "fail", ("torch>=2.11",)),
    ("settings", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "ok", ()),
    ("settings", {GRAPH_REGISTER: "0"}, "ok", ()),
    ("settings", {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "warn", ("catch nothing",)),
    ("settings", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, "warn", ("unset PYTORCH_NO_CUDA",)),
    ("settings", {"LD_PRELOAD": "/x/torch_memory_saver.so"}, "warn", ("unset LD_PRELOAD",)),
    ("settings", {GRAPH_REGISTER: "1", IN_PROCESS: "1"}, "warn", ("captured graphs", "vLLM")),
    *[("settings", {name: "1"}, "warn", (f"unset {name}",)) for name in ALLOCATOR_HOOKS],
    ("limits", {LIMITS: answer((4095, 1 << 20))}, "warn", ("4095", "1048576", "ulimit -n 65536")),
    ("limits", {LIMITS: answer((4096, 4096))}, "ok", ()),
    ("limits", {LIMITS: answer((NONE, NONE))}, "ok", ()),
    ("host memory", {MEMORY: answer(1 << 30)}, "warn", ("1.00 GiB of", "end other programs")),
    ("host memory", GROUP, "warn", ("limited to 1.0 MiB", "limit_bytes")),
    (
        "shared memory and disk",
        {"shutil.disk_usage": answer(SimpleNamespace(free=64 << 20))},
        "warn",
        ("64.0 MiB free in /dev/shm", "--shm-size"),
    ),
    ("CPU", {"memsaver.tag.refill.Refill.fill": answer(None)}, "fail", ("restored: False",)),
    ("driver", {"memsaver.doctor.DEVICE_FILE": Path("/no/such")}, "skip", ("on the CPU",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join((case[0], *case[1])))
def test_problem_is_reported_with_its_remedy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, status, words = case
    for setting in SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    for place, value in changes.items():
        if "." in place:
            monkeypatch.setattr(place, value)
        else:
            monkeypatch.setenv(place, value)
    check = run_check(name, "cpu")
    monkeypatch.undo()
    assert_tells(check, status, *words)


def test_low_limit_of_memory_maps_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MAX_MAP_COUNT", tmp_path / "max_map_count")
    doctor.MAX_MAP_COUNT.write_text("65529\n")
    assert_tells(run_check("limits"), "warn", "65529", "sysctl -w vm.max_map_count=65530")


@pytest.mark.parametrize(
    ("code", "version", "status", "words"),
    [
        (0, 13010, "ok", ("serves CUDA 13.1",)),
        (803, 13010, "fail", ("cuInit failed with error 803", "restart")),
        (0, 12080, "fail", ("older than torch's CUDA 13.0", "update")),
    ],
)
def test_driver_check_fails_on_error_or_older_cuda(
    code: int, version: int, status: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, version), cuInit=lambda _: (code,))
    monkeypatch.setattr(doctor, "DEVICE_FILE", Path("/dev/null"))
    monkeypatch.setattr("importlib.import_module", answer(driver))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = run_check("driver")
    monkeypatch.undo()
    assert_tells(check, status, *words)


def test_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memsaver").mkdir()
    shutil.copy(build.shim_library(), tmp_path / "memsaver")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_tells(run_check("compilers", "cpu"), "warn", "no region() on the CPU", "Triton", "gcc")
    monkeypatch.setattr(build, "HERE", tmp_path)  # a source tree in which nothing was compiled
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert_tells(run_check("compilers", "cpu"), "fail", "no compiler was found")
