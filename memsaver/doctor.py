"""Check that this machine can run memsaver, and suggest a remedy for each problem.

``memsaver doctor`` prints the results as a table. `CHECKS` lists the checks in table order.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from memsaver import compat
from memsaver.content.on_disk import default_directory
from memsaver.errors import CompilerError, format_bytes
from memsaver.memory import as_device, torch_allocator
from memsaver.native import build, shim
from memsaver.saver import MemorySaver
from memsaver.sharing.lease import attach
from memsaver.system.hidden_packages import HIDES, PACKAGES, REMEDY, hiding
from memsaver.system.host_memory import available_memory, container_memory

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
TRAINERS = {"verl": (0, 9, 1), "trl": (1, 16, 0)}  # the versions that were tried
OPEN_FILES, MEMORY_MAPS = 4096, 65530  # the second is the kernel's own default
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
DEVICE_FILE = Path("/dev/nvidiactl")
LITTLE_MEMORY, LITTLE_SHARED = 2 << 30, 1 << 30  # bytes
SAMPLE_BYTES = 4 << 20
COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}

Status = Literal["ok", "warn", "fail", "skip"]
Finding = tuple[Status, str, str]
"""Status, finding, and remedy ("" for "ok" and "skip")."""


@dataclass(frozen=True)
class Check:
    """One row of the table: `name` is a key of `CHECKS`, `remedy` is "" for "ok" and "skip"."""

    name: str
    status: Status
    finding: str
    remedy: str = ""


def examine(device: str | torch.device | None = None) -> list[Check]:
    """Run every check in a fixed order. A check that raises counts as failed.

    All memory is released afterwards; the context on a GPU stays.

    Args:
        device: GPU to try; ``None`` for the current GPU, if there is any; ``"cpu"`` for no GPU.

    Returns:
        One `Check` for each entry of `CHECKS`.
    """
    return [run_check(name, device) for name in CHECKS]


def run_check(name: str, device: str | torch.device | None = None) -> Check:
    """Run one check, independently of the others."""
    try:
        return Check(name, *CHECKS[name](device))
    except Exception as error:
        text = " ".join(str(error).split())
        remedy = "look at nvidia-smi, dmesg and the other rows; if they are fine, report the table"
        return Check(name, "fail", f"{type(error).__name__}: {text}", remedy)


def report(device: str | None) -> int:
    """Run the checks, print the table, and return the exit status: 1 if a check failed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    checks = examine(device)
    table = Table(box=None, pad_edge=False)
    for column in ("check", "status", "found, and what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        color = COLORS[check.status]
        text = Text(check.finding)
        if check.remedy:
            text.append(f"\n-> {check.remedy}", style=color)
        table.add_row(Text(check.name), Text(check.status, style=color), text)
    console = Console(highlight=False)
    console.print(table)
    attention = sum(check.status in ("warn", "fail") for check in checks)
    console.print(f"{len(checks)} checks, {attention} need{'s' * (attention == 1)} attention")
    return int(any(check.status == "fail" for check in checks))


def _versions(_: Any) -> Finding:
    """Compare installed packages with the oldest that work; all but torch may be missing."""
    versions, outdated = [f"Python {platform.python_version()}"], []
    for name, oldest in {**OLDEST, **compat.OLDEST}.items():
        version = importlib.metadata.version(name) if importlib.util.find_spec(name) else "missing"
        versions.append(f"{name} {version}")
        optional = name != "torch" and version == "missing"
        if not optional and compat.is_older(version, oldest):
            outdated.append(f"'{name}>={'.'.join(map(str, oldest))}'")
    text = f"{', '.join(versions)}; torch's CUDA: {torch.version.cuda or 'none'}"
    remedy = f"pip install {' '.join(outdated)}" if outdated else ""
    return "fail" if outdated else "ok", text, remedy


def _hidden(_: Any) -> Finding:
    """Find files and folders of the working directory, or of PYTHONPATH, that hide our packages."""
    found = [path for name in PACKAGES if (path := hiding(name, os.getcwd()))]
    if not found:
        return "ok", f"nothing here hides {', '.join(PACKAGES)}", ""
    return "warn", "\n".join(f"{path} {HIDES}" for path in found), REMEDY


def _verl(_: Any) -> Finding:
    """Check that verl finds the plugin. verl is not imported, which would take many seconds."""
    active = os.environ.get("VERL_ENGINE_VENDOR") == "memsaver"
    keys = "rollout.name=memsaver, or memsaver_vllm and VLLM_PLUGINS=memsaver, on FSDP2"
    setting = "VERL_ENGINE_VENDOR=memsaver"
    status, text, remedy = _trainer("verl", "verl.plugins", active, setting, keys)
    allowed = os.environ.get(name := "VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    left_out = allowed != "auto" and "memsaver" not in map(str.strip, allowed.split(","))
    if status == "ok" and left_out:
        return "warn", f"{text}; {name}={allowed} keeps it from being loaded", f"unset {name}"
    return status, text, remedy


def _trl(_: Any) -> Finding:
    """Check that TRL's vLLM finds the plugin. TRL itself needs a call, and no plugin."""
    active = "memsaver" in os.environ.get("VLLM_PLUGINS", "").split(",")
    call = "trainer_bridge.adoption.trl.use(trainer) before train()"
    return _trainer("trl", "vllm.general_plugins", active, "VLLM_PLUGINS=memsaver", call)


def _trainer(package: str, group: str, active: bool, setting: str, then: str) -> Finding:
    """Check the version of a trainer, and memsaver's plugin for it or for its engine.

    Args:
        package: A key of `TRAINERS`.
        group: Group of the plugin's entry point.
        active: Whether the plugin is active in this environment.
        setting: The variable that activates it.
        then: What else a user sets or calls.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "skip", "not installed", ""
    oldest = ".".join(map(str, TRAINERS[package]))
    if compat.is_older(version, TRAINERS[package]):
        remedy = f"pip install '{package}>={oldest}'"
        return "warn", f"{version}: memsaver's weight sync needs {oldest}", remedy
    text = version if version == oldest else f"{version}, tried only with {oldest}"
    if not _plugin_found(group):
        install = "install memsaver into this environment with pip; PYTHONPATH does not suffice"
        return "warn", f"{text}; memsaver's entry point {group} is missing or broken", install
    state = "active by" if active else "not active here: set"
    page = "docs/how-to/other-trainers.md"
    return "ok", f"{text}; plugin found, {state} {setting}; then {then} ({page})", ""


def _plugin_found(group: str) -> bool:
    """Return whether an entry point of memsaver exists in `group`, with a module to import."""
    for entry in importlib.metadata.entry_points(group=group, name="memsaver"):
        with contextlib.suppress(ImportError):
            if importlib.util.find_spec(entry.module):
                return True
    return False


def _compilers(device: Any) -> Finding:
    """Load the shim, and look for the compilers of CPU regions and Triton's kernels."""
    path, problems = build.shim_library(), []
    shim.library()
    try:
        build.cpu_hook_library()
    except CompilerError as error:
        problems.append(f"no region() on the CPU: {str(error).splitlines()[0]}")
    # Triton calls CC, gcc or clang, never cc.
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        problems.append("no C compiler for Triton's kernels")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        problems.append("no Python.h for Triton's kernels")
    came = "came with the package" if path.parent == build.HERE else f"compiled, in {path.parent}"
    text = "; ".join([f"memory shim {came}", *problems])
    status: Status = "fail" if problems and _gpu(device) else "warn" if problems else "ok"
    return status, text, "install gcc, g++ and Python's headers (python3-dev)" if problems else ""


def _conflicts(_: Any) -> Finding:
    """Find settings that keep allocations off tags, or registrations that outlive a pause."""
    conflicts: list[tuple[str, str]] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "cudaMallocAsync" in os.environ.get(name, ""):
            conflicts.append((name, "cudaMallocAsync ignores memory pools: regions catch nothing"))
    if (name := "PYTORCH_NO_CUDA_MEMORY_CACHING") in os.environ:
        conflicts.append((name, "torch uses no memory pools: regions catch nothing"))
    if "torch_memory_saver" in os.environ.get("LD_PRELOAD", ""):
        conflicts.append(("LD_PRELOAD", "torch_memory_saver intercepts cudaMalloc"))
    if hook := torch_allocator.registering_hook():
        why = "torch registers tags' pages with NCCL, which uses them after a pause"
        conflicts.append((hook, why))
    if (
        name := torch_allocator.GRAPH_REGISTER
    ) in os.environ and torch_allocator.registers_graphs():
        conflicts.append((name, "NCCL registers the buffers of captured graphs, tags' too"))
    if os.environ.get(compat.IN_PROCESS, "0") != "0":
        conflicts.append((compat.IN_PROCESS, "vLLM's engine would run in a separate process"))
    if not conflicts:
        return "ok", "no setting of torch, NCCL or vLLM is in the way", ""
    text = "\n".join(f"{name}={os.environ[name]}: {why}" for name, why in conflicts)
    return "warn", text, f"unset {', '.join(name for name, _ in conflicts)}"


def _limits(_: Any) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maps = int(MAX_MAP_COUNT.read_text()) if MAX_MAP_COUNT.exists() else MEMORY_MAPS
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES
    text = f"{soft} open files (hard limit {hard}), {maps} memory maps in a process"
    remedies = ["run `ulimit -n 65536` before the program; each tag takes some"] * few
    if maps < MEMORY_MAPS:
        remedies.append(f"run `sysctl -w vm.max_map_count={MEMORY_MAPS}` as root, on the host")
    return "warn" if remedies else "ok", text, "; ".join(remedies)


def _host_memory(_: Any) -> Finding:
    free, total, group = available_memory(), psutil.virtual_memory().total, container_memory()
    text = f"{format_bytes(free)} of {format_bytes(total)} are available"
    if group is not None and group.limit < total:
        text += f"; the container is limited to {format_bytes(group.limit)}, and killed beyond that"
        limit = "give MemorySaver('cpu') a smaller limit_bytes, or raise docker run --memory"
        return "warn", text, limit
    if free < LITTLE_MEMORY:
        return "warn", text, "end other programs: content='host' and CPU tags use this memory"
    return "ok", text, ""


def _room(_: Any) -> Finding:
    shared, disk = Path("/dev/shm"), default_directory()
    free = {path: shutil.disk_usage(path).free for path in (shared, disk) if path.exists()}
    text = ", ".join(f"{format_bytes(nbytes)} free in {path}" for path, nbytes in free.items())
    if free.get(shared, 0) < LITTLE_SHARED:
        return "warn", text, "docker run --shm-size=16g: NCCL, Ray and data loaders use /dev/shm"
    return "ok", f"{text} (content='disk')", ""


def _driver(_: Any) -> Finding:
    if not DEVICE_FILE.exists():
        return "skip", f"no NVIDIA driver (no {DEVICE_FILE}): memsaver works on the CPU", ""
    driver = importlib.import_module("cuda.bindings.driver")
    version, code = driver.cuDriverGetVersion()[1], int(driver.cuInit(0)[0])
    text = f"serves CUDA {version // 1000}.{version % 1000 // 10}"
    if code:
        restart = "restart the container (--gpus all) or the machine, or reinstall the driver"
        return "fail", f"{text}; cuInit failed with error {code}", restart
    if torch.version.cuda and version // 1000 < int(torch.version.cuda.split(".")[0]):
        return "fail", f"{text}, older than torch's CUDA {torch.version.cuda}", "update the driver"
    return "ok", text, ""


def _gpu(device: str | torch.device | None) -> torch.device | None:
    """Return the GPU to examine, if any; raise ``ValueError`` for an unsupported device."""
    if device is None and not torch.cuda.is_available():
        return None
    chosen = as_device("cuda" if device is None else device)
    return chosen if chosen.type == "cuda" else None


def _try(device: torch.device) -> Finding:
    """Allocate a tensor in a region, pause and resume it, and map it as another process would."""
    with contextlib.closing(MemorySaver(device)) as saver:
        with saver.region("doctor", content="host"):
            tensor = torch.arange(SAMPLE_BYTES, device=device) % 251
        expected, offset = tensor.cpu().clone(), saver.offset_of(tensor)  # raises on no tag
        saver.pause()
        kept = saver.report(others=False).committed_bytes
        saver.resume()
        same = torch.equal(tensor.cpu(), expected)
        with attach(saver.share("doctor")) as lease:
            shared = torch.equal(lease.tensor((9,), tensor.dtype, offset).cpu(), expected[:9])
        holders = saver.report().others
        del tensor
    held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in holders.items() if nbytes)
    if same and shared and not kept:
        return "ok", "tags work" + (f"; other memory: {held}" if held else ""), ""
    text = f"{kept} bytes stayed while paused, content restored: {same}, shared: {shared}"
    return "fail", text, "report it with the whole table"


def _try_gpu(device: Any) -> Finding:
    if (gpu := _gpu(device)) is None:
        return "skip", "no GPU to examine", ""
    name, (free, total) = torch.cuda.get_device_name(gpu), torch.cuda.mem_get_info(gpu)
    status, text, remedy = _try(gpu)
    return status, f"{name}, {format_bytes(free)} free of {format_bytes(total)}; {text}", remedy


CHECKS: dict[str, Callable[[Any], Finding]] = {
    "versions": _versions,
    "packages": _hidden,
    "verl": _verl,
    "TRL": _trl,
    "compilers": _compilers,
    "settings": _conflicts,
    "limits": _limits,
    "host memory": _host_memory,
    "shared memory and disk": _room,
    "CPU": lambda _: _try(torch.device("cpu")),
    "driver": _driver,
    "GPU": _try_gpu,
}
