"""The doctor: what it says about this machine, and about machines where something is in the way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import doctor
from memsaver import doctor_gpu as gpu
from memsaver.compat import IN_PROCESS
from memsaver.doctor import CHECKS, Check, Row, examine, report, run_check
from memsaver.doctor_gpu import Target, choose_target
from memsaver.memory import make_backend
from memsaver.memory.torch_allocator import ALLOCATOR_HOOKS, GRAPH_REGISTER
from memsaver.native import shim
from memsaver.system import machine
from tests.helpers.memory import open_fds, process_bytes, settled_fds
from tests.helpers.memsaver.savers import python, until

HERE = Target(None, "a test")
GPU = Target(torch.device("cuda", 0))
SECOND_GPU = Target(torch.device("cuda", 1))

FAKE_LIBCUDA = """
int init, version, virtual_memory, export;
int cuInit(unsigned flags) { return init; }
int cuDriverGetVersion(int *number) { *number = version; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 40) return 101;
    *value = attribute == 102 ? virtual_memory : attribute == 103 ? export : 0;
    return 0;
}
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)uuid;
    return uuid[4] == 'a';
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[1] = 3ull << 30;
    return 0;
}
"""


Libcuda = Callable[..., None]


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "fake.c").write_text(FAKE_LIBCUDA)
    flags = ["-shared", "-fPIC", "-o", str(folder / "libcuda.so")]
    subprocess.run(["cc", *flags, str(folder / "fake.c")], check=True)
    return folder / "libcuda.so"


@pytest.fixture
def libcuda(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Libcuda:
    """Puts a driver library of the given answers in the place of NVIDIA's."""

    def make(**changed: int) -> None:
        answers = {"init": 0, "version": 13000, "virtual_memory": 1, "export": 1} | changed
        for name, value in answers.items():
            ctypes.c_int.in_dll(ctypes.CDLL(str(fake_library)), name).value = value
        monkeypatch.setattr(gpu, "LIBCUDA", str(fake_library))
        monkeypatch.setattr(gpu, "LIBNVML", str(fake_library))

    return make


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def look(name: str, target: Target = HERE) -> Check:
    """Run one check by its name, as ``examine`` runs it."""
    (row,) = [row for row in CHECKS if row.name == name]
    return run_check(row, target)


def assert_tells(check: Check, status: str, *words: str) -> None:
    assert check.status == status, check
    assert bool(check.remedy) == (status in ("warn", "fail"))
    for word in words:
        assert word in check.found + " -> " + check.remedy, check


def test_this_machine_is_told_as_it_is() -> None:
    examine("cpu")  # what is loaded once, is loaded
    before = process_bytes("cpu"), settled_fds()
    checks = named(examine("cpu"))
    # connections are closed by their own threads
    until(lambda: (process_bytes("cpu"), open_fds()) == before)
    assert list(checks) == [row.name for row in CHECKS]
    assert {check.status for check in checks.values()} <= {"ok", "skip", "warn"}, checks
    must_work = [
        "Python",
        "torch",
        "memory shim",
        "regions on the CPU",
        "pause and resume on the CPU",
        "sharing a tag",
    ]
    must_work += ["memory without a file", "passing files between processes"]
    assert [checks[name].status for name in must_work] == ["ok"] * len(must_work), checks
    assert torch.__version__ in checks["torch"].found
    for row in CHECKS:
        if row.looks_at == "gpu":
            assert checks[row.name] == Check(row.name, "skip", "no GPU: asked for the CPU only")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_is_tried_out_and_gets_everything_back() -> None:
    checks = named(examine("cuda:0"))  # makes the context and loads the kernels
    engines = {"vLLM", "SGLang"}  # skipped where they are not installed
    others = [check for name, check in checks.items() if name not in engines]
    assert {check.status for check in others} <= {"ok", "warn"}, others
    assert torch.cuda.get_device_properties(0).name in checks["GPUs"].found
    assert " free of " in checks["GPUs"].found
    for name in (
        "exporting GPU memory",
        "pause and resume on the GPU",
        "regions on the GPU",
        "CUDA graphs",
    ):
        assert checks[name].status == "ok", checks[name]
    assert "GB/s to the GPU" in checks["pinned memory"].found
    torch.cuda.empty_cache()
    before = process_bytes("cuda:0")
    examine("cuda:0")
    torch.cuda.empty_cache()
    assert process_bytes("cuda:0") - before <= 4 << 20


def test_a_fresh_interpreter_imports_little_and_reports() -> None:
    heavy = {"cuda", "rich", "triton", "ray", "transformers", "omegaconf"}
    code = f"""
import runpy, sys, torch
old = set(sys.modules)
import memsaver.doctor
print({heavy} & set(sys.modules) - old)
sys.argv = ["doctor", "--help"]
runpy.run_module("memsaver.doctor", run_name="__main__")
"""
    first, *lines = python(code).splitlines()
    assert first == "set()" and lines[0].startswith("usage: ")


def test_a_check_that_breaks_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = raises(RuntimeError("two\nlines"))
    rows = [
        Row("one", "machine", broken, "do this"),
        Row("two", "cpu", answer(("ok", "fine")), "unused"),
    ]
    monkeypatch.setattr(doctor, "CHECKS", rows)
    assert examine("cpu") == [
        Check("one", "fail", "RuntimeError: two lines", "do this"),
        Check("two", "ok", "fine"),
    ]


def test_every_check_has_a_name_of_its_own_and_a_remedy() -> None:
    assert len({row.name for row in CHECKS}) == len(CHECKS) > 20
    assert all(row.remedy for row in CHECKS)
    with pytest.raises(AssertionError, match="without a remedy"):
        Check("x", "warn", "found")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", torch.device("meta")])
def test_a_device_that_cannot_be_tried_is_a_failed_check(device: str | torch.device) -> None:
    assert_tells(look("GPUs", choose_target(device)), "fail")


def test_the_table_and_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [
        Check("one", "ok", "[fine]"),
        Check("two", "warn", "so so", "do this"),
        Check("three", "skip", "none"),
    ]
    monkeypatch.setattr("memsaver.doctor.examine", lambda device: checks)
    assert report(None) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "3 checks, 1 need attention"
    assert "[fine]" in text and "-> do this" in text
    checks.append(Check("four", "fail", "broken", "do that"))
    assert report(None) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "4 checks, 2 need attention"


def answer(value: object) -> Callable[..., object]:
    return lambda *_: value


def raises(error: Exception) -> Callable[..., object]:
    def call(*_: object) -> None:
        raise error

    return call


def drop_descriptors(connection: socket.socket, text: list[bytes], fds: list[int]) -> int:
    return connection.send(text[0])


BINDING, ALLOCATOR = "CUDA binding for Python", "torch's allocator settings"
EITHER = (HERE, "warn"), (GPU, "fail")
VERSION = "importlib.metadata.version"
IMPORT = "importlib.import_module"
LIMITS = "resource.getrlimit"
NONE = resource.RLIM_INFINITY
CUDA_CONF = "PYTORCH_CUDA_ALLOC_CONF"
CONF = "PYTORCH_ALLOC_CONF"
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
UNSET = {CUDA_CONF: None, CONF: None, UNCACHED: None}
SET = UNSET | {CUDA_CONF: "expandable_segments:True"}
REGISTERED = "registered memory"
UNHOOKED = dict.fromkeys((GRAPH_REGISTER, *ALLOCATOR_HOOKS))
TMS = "/x/torch_memory_saver_hook_mode_preload.abi3.so"
REFILL = "memsaver.tag.saving.Refill.fill"
HOOK = "memsaver.memory.memfd.HostBackend.allocate_from"
MISSING = raises(ModuleNotFoundError("no such module"))
REFUSED = raises(PermissionError("not permitted"))
DROPPED = {"socket.send_fds": drop_descriptors}
NO_DRIVER = {"memsaver.doctor_gpu.LIBCUDA": "libno-such-driver.so.1"}
NO_DEVICE = NO_DRIVER | {"memsaver.doctor_gpu.DEVICE_FILE": Path("/no/nvidiactl")}
FIND, VERSION = "importlib.util.find_spec", "importlib.metadata.version"
VLLM = {FIND: lambda name: name, VERSION: lambda name: "0.24.0"}  # `true` imports it
VLLM |= {"memsaver.doctor.sys.executable": shutil.which("true"), IN_PROCESS: None}
Case = tuple[str, Target, dict[str, Any], str, tuple[str, ...]]
"""The check; what it is asked about; what is different, of the process (dotted) or of the
environment; what it says.
"""

CASES: list[Case] = [
    ("torch", HERE, {"torch.__version__": "2.9.1+cu126"}, "fail", ("2.9.1", "torch>=2.11")),
    *[
        ("torch", HERE, {"torch.__version__": text}, "ok", ())
        for text in ("2.11.0", "2.13.0+cpu", "3.0.0a0+git1")
    ],
    ("Python", HERE, {"sys.version_info": (3, 14, 0)}, "warn", ("3.11 to 3.13",)),
    ("Python", HERE, {"sys.version_info": (3, 10, 9)}, "fail", ("3.11 to 3.13",)),
    *[("Python", HERE, {"sys.version_info": (3, minor, 0)}, "ok", ()) for minor in (11, 13)],
    (
        "Triton",
        GPU,
        {"sysconfig.get_paths": answer({"include": ""}), "CC": "cc"},
        "fail",
        ("Python.h", "python3-dev"),
    ),
    *[
        ("Triton", on, {VERSION: answer("3.5.1")}, status, ("3.5.1, too old", "triton>=3.6"))
        for on, status in EITHER
    ],
    *[
        ("Triton", on, {IMPORT: MISSING}, status, ("does not import: no such", "pip install"))
        for on, status in EITHER
    ],
    (
        BINDING,
        HERE,
        {VERSION: answer("12.9.1"), IMPORT: answer(None)},
        "warn",
        ("12.9.1", "memsaver[cuda]"),
    ),
    (BINDING, HERE, {IMPORT: MISSING}, "skip", ()),
    (BINDING, GPU, {IMPORT: MISSING}, "fail", ("does not import", "memsaver[cuda]")),
    (ALLOCATOR, HERE, SET, "ok", ()),
    (
        ALLOCATOR,
        HERE,
        UNSET | {CUDA_CONF: "backend:cudaMallocAsync"},
        "warn",
        ("cudaMallocAsync", CUDA_CONF),
    ),
    (
        ALLOCATOR,
        HERE,
        SET | {CONF: "max_split_size_mb:64,backend:cudaMallocAsync"},
        "warn",
        (f"out of {CONF}",),
    ),
    (ALLOCATOR, HERE, SET | {UNCACHED: "0"}, "warn", (f"unset {UNCACHED}",)),
    ("preloaded libraries", HERE, {"LD_PRELOAD": "/x/libjemalloc.so"}, "ok", ()),
    (
        "preloaded libraries",
        HERE,
        {"LD_PRELOAD": TMS},
        "warn",
        ("torch_memory_saver", "LD_PRELOAD"),
    ),
    (REGISTERED, HERE, UNHOOKED, "ok", ("keeps them off its tags", "install turns it off")),
    (REGISTERED, HERE, UNHOOKED | {GRAPH_REGISTER: "0"}, "ok", ("registers no buffers",)),
    (REGISTERED, HERE, UNHOOKED | {GRAPH_REGISTER: "1"}, "warn", ("drop-ins", "or set it to 0")),
    *[
        (REGISTERED, HERE, UNHOOKED | {name: "1"}, "warn", (f"unset {name}",))
        for name in ALLOCATOR_HOOKS
    ],
    (
        "open files",
        HERE,
        {LIMITS: answer((4095, 1 << 20))},
        "warn",
        ("up to 4095", "1048576", "ulimit -n 65536"),
    ),
    (
        "open files",
        HERE,
        {LIMITS: answer((256, 1024))},
        "warn",
        ("256", "hard limit 1024", "docker run --ulimit"),
    ),
    (
        "open files",
        HERE,
        {LIMITS: answer((256, NONE))},
        "warn",
        ("hard limit unlimited", "ulimit -n 65536"),
    ),
    ("open files", HERE, {LIMITS: answer((4096, 4096))}, "ok", ()),
    ("open files", HERE, {LIMITS: answer((NONE, NONE))}, "ok", ("up to unlimited",)),
    ("locked memory", GPU, {LIMITS: answer((NONE, NONE))}, "ok", ("unlimited",)),
    (
        "memory without a file",
        HERE,
        {"os.memfd_create": REFUSED},
        "fail",
        ("Error: not permitted", "seccomp"),
    ),
    (
        "memory without a file",
        HERE,
        {"os.memfd_create": None},
        "fail",
        ("no os.memfd_create", "Linux 3.17"),
    ),
    ("passing files between processes", HERE, DROPPED, "fail", ("did not arrive", "SCM_RIGHTS")),
    ("CUDA driver", HERE, NO_DEVICE, "skip", ("no NVIDIA driver",)),
    (
        "CUDA driver",
        HERE,
        NO_DRIVER | {"memsaver.doctor_gpu.DEVICE_FILE": Path(os.devnull)},
        "fail",
        ("--gpus all",),
    ),
    (
        "pause and resume on the CPU",
        HERE,
        {REFILL: answer(None)},
        "fail",
        ("back changed",),
    ),
    ("vLLM", HERE, {FIND: lambda name: None}, "skip", ("not installed; only engine.kind=vllm",)),
    ("vLLM", HERE, VLLM | {VERSION: lambda name: "0.23.1"}, "warn", ("'vllm>=0.24'",)),
    ("vLLM", HERE, VLLM | {IN_PROCESS: "1"}, "warn", ("0.24.0", f"unset {IN_PROCESS}")),
    ("vLLM", HERE, VLLM | {IN_PROCESS: "0"}, "ok", ("0.24.0",)),
    (
        "SGLang",
        HERE,
        {FIND: lambda name: name, VERSION: lambda name: "0.5.16", IN_PROCESS: "1"},
        "warn",
        ("0.5.16, does not import: ModuleNotFoundError: No module named 'sglang'", "anew"),
    ),
    (
        "regions on the CPU",
        HERE,
        {HOOK: lambda *_: contextlib.nullcontext()},
        "fail",
        ("not on its tag",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join((case[0], case[3], *case[4][:1])))
def test_what_is_in_the_way_is_told_with_its_remedy(
    case: Case, monkeypatch: pytest.MonkeyPatch, fds: int
) -> None:
    name, target, changes, status, words = case
    for place, value in changes.items():
        if "." in place and value is None:
            monkeypatch.delattr(place)
        elif "." in place:
            monkeypatch.setattr(place, value)
        elif value is None:
            monkeypatch.delenv(place, raising=False)
        else:
            monkeypatch.setenv(place, value)
    check = look(name, target)
    monkeypatch.undo()
    assert_tells(check, status, *words)
    until(lambda: open_fds() <= fds)  # connections are closed by their own threads


def test_a_torch_that_breaks_on_looking_for_gpus_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", raises(RuntimeError("driver mismatch")))
    assert_tells(look("GPUs", choose_target(None)), "fail", "driver mismatch", "nvidia-smi")


def test_sharing_sees_other_memory(
    device: str, collected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = torch.device(device)
    assert gpu.sharing(on)[0] == "ok"
    fds = settled_fds()  # those, too, that a process's first call of the driver opens for good
    backend: Any = type(make_backend(on))

    def import_fd(self: Any, fd: int) -> int:
        """New memory instead of what was exported."""
        os.close(fd)
        return self.create(self.granularity).handle

    monkeypatch.setattr(backend, "import_fd", import_fd)
    assert_tells(Check("x", *gpu.sharing(on)), "fail", "do not show the same bytes")
    until(lambda: open_fds() <= fds)  # connections are closed by their own threads


Driver = tuple[dict[str, int], str | None, str, Target, str, tuple[str, ...]]
DRIVERS: list[Driver] = [
    (
        {"version": 12080},
        None,
        "CUDA driver",
        HERE,
        "ok",
        ("serves CUDA 12.8, GPUs visible to it: 2",),
    ),
    ({"version": 12080}, None, "GPUs", HERE, "warn", ("driver: 2, but a test", "built for CUDA")),
    ({"version": 12080}, "12.9", "CUDA driver", HERE, "ok", ()),
    (
        {"version": 12080},
        "13.0",
        "CUDA driver",
        HERE,
        "fail",
        ("built for CUDA 13.0", "update NVIDIA's driver"),
    ),
    ({"version": 12080}, "13.0", "GPUs", HERE, "fail", ("driver: 2, but a test", "restart")),
    ({"version": 12080}, "13.0", "GPUs", choose_target("cpu"), "skip", ()),
    ({"init": 100}, "13.0", "CUDA driver", HERE, "ok", ()),
    ({"init": 100}, "13.0", "GPUs", HERE, "skip", ()),
    (
        {"init": 803},
        "13.0",
        "CUDA driver",
        HERE,
        "fail",
        ("cuInit failed with error 803", "restart"),
    ),
    ({"init": 803}, "13.0", "GPUs", HERE, "skip", ()),
    ({}, "13.0", "GPU virtual memory", GPU, "ok", ()),
    ({}, "13.0", "GPU virtual memory", SECOND_GPU, "fail", ()),  # attributes are device 0's
    ({"virtual_memory": 0}, "13.0", "GPU virtual memory", GPU, "fail", ("no virtual memory",)),
    ({"export": 0}, "13.0", "GPU virtual memory", GPU, "fail", ("cannot export",)),
]


@pytest.mark.parametrize("case", DRIVERS)
def test_what_a_driver_says_of_itself_and_its_gpus(
    case: Driver, libcuda: Libcuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, built_for, name, target, status, words = case
    libcuda(**answers)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert_tells(look(name, target), status, *words)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in [*shim.HERE.glob("*.[ch]"), *shim.HERE.glob("*.cpp")]:
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(shim, "HERE", tmp_path)  # a source tree without the prebuilt shim
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert_tells(look("memory shim"), "fail", "no C/C++ compiler found", "gcc")
    assert_tells(look("regions on the CPU"), "warn", "region() on the CPU does not work", "g++")
    monkeypatch.delenv("CC", raising=False)
    assert_tells(look("Triton", GPU), "fail", "no C compiler", "gcc")
    assert look("Triton").status == "ok" and "only matters with a GPU" in look("Triton").found
    monkeypatch.setenv("CC", "/opt/cc")
    assert "no C compiler" not in look("Triton", GPU).found


def test_few_memory_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_MAP_COUNT", tmp_path / "max_map_count")
    assert look("memory maps").status == "skip"
    for count, status in ((65530, "ok"), (65529, "warn")):
        doctor.MAX_MAP_COUNT.write_text(f"{count}\n")
        assert look("memory maps").status == status
    assert_tells(look("memory maps"), "warn", "65529", "sysctl -w vm.max_map_count=65530")


def write_group(folder: Path, limit: str, used: int, cache: int, v1: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    key = "total_inactive_file" if v1 else "inactive_file"
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {cache if key == 'inactive_file' else 1}\n{key} {cache}\n"
    )


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("seen", ["own", "outside"])
def test_the_containers_limit(
    v1: bool, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``outside``: the group's path is the host's, which a container does not see; its own group is
    the root there.
    """
    path = "/../pods/one" if seen == "outside" else "/pods/one"
    (tmp_path / "self").write_text(
        f"5:cpu,cpuacct:/x\n4:hugetlb,memory:{path}\n0::/\n" if v1 else f"0::{path}\n"
    )
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    for name, file in (("CGROUPS", "groups"), ("CGROUP_OF_SELF", "self"), ("MEMINFO", "meminfo")):
        monkeypatch.setattr(machine, name, tmp_path / file)
    assert look("container's memory limit").status == "ok"  # no such files at all
    assert look("available memory").found == "8.00 GiB available"
    root = tmp_path / "groups" / ("memory" if v1 else "")
    write_group(root, "9223372036854771712" if v1 else "max", 0, 0, v1)
    assert look("container's memory limit").status == "ok"
    if seen == "own":
        write_group(root / "pods" / "one", str(32 << 30), 0, 0, v1)
        assert look("container's memory limit").status == "ok"
    limited = root / "pods" if seen == "own" else root
    write_group(limited, str(4 << 30), 3 << 30, 2 << 30, v1)
    assert_tells(
        look("container's memory limit"),
        "warn",
        "4.00 GiB of the machine's 16.00 GiB",
        "limit_bytes",
    )
    assert look("available memory") == Check("available memory", "ok", "3.00 GiB available")
    write_group(limited, str(4 << 30), 3 << 30, 0, v1)
    assert_tells(look("available memory"), "warn", "1.00 GiB available", "container's limit")
    if seen == "own":  # what lies beside this group has filled the larger one around it
        write_group(root / "pods" / "one", str(2 << 30), 1 << 20, 0, v1)
        assert_tells(look("available memory"), "warn", "1.00 GiB available", "container's limit")
        kept = int(machine.RAY_KEEPS * (4 << 30))
        assert machine.available_memory() == (1 << 30) - kept


def test_gpus_are_listed(libcuda: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory = "NVIDIA H100", 80 << 30

        def __init__(self, index: int) -> None:
            self.uuid = "aaaa" if index == 2 else f"{index}{index}"

    asked = []
    libcuda()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: asked.append(index) or (5 << 30, 0)
    )
    lines = look("GPUs", GPU).found.splitlines()
    assert lines[0] == "cuda:0 NVIDIA H100, 3.00 GiB free of 80.00 GiB, GPU-00"
    # NVML does not know it, and torch is not asked
    assert lines[2] == "cuda:2 NVIDIA H100, 80.00 GiB, GPU-aaaa"
    assert not asked
    monkeypatch.setattr(gpu, "LIBNVML", "libno-such-library.so")
    lines = look("GPUs", SECOND_GPU).found.splitlines()
    assert [" free of " in line for line in lines] == [False, True, False] and asked == [1]


def test_speed_classes() -> None:
    told = [gpu.judge_speed(speed, "x") for speed in (55, 24, 12, 7, 3)]
    assert [finding[0] for finding in told] == ["ok", "ok", "ok", "ok", "warn"]
    assert [finding[1].split(": ")[1] for finding in told[:3]] == [name for _, name in gpu.SPEEDS]
    assert "slow" in told[4][1] and "nvidia-smi" in told[4][-1]
