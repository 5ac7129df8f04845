"""The sdist and the wheel built from it, tried in an environment without the source tree.

`make dist` runs these tests and leaves both files in dist/; `make test` does not run them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("memsaver", "kvcache", "rollout", "trainer_bridge", "recipes")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"


USERS_SCRIPT = """
import torch

import recipes
from kvcache import KVCacheConfig
from memsaver import MemorySaver, OutOfMemory
from rollout import Completion, Engine, EngineConfig, SamplingParams
from trainer_bridge import Cycle, TrainerConfig, open_inprocess

saver = MemorySaver(device="cpu", limit_bytes=1 << 30)
with saver.region("weights", content="host"):
    model = torch.nn.Linear(8, 8)
kv: torch.Tensor = saver.empty((8, 8), torch.bfloat16, tag="kv_cache")
saver.pause("kv_cache")
try:
    saver.resume("kv_cache")
except OutOfMemory as error:
    print(error)
held: int = saver.report().tags["weights"].committed_bytes

engine = Engine.from_pretrained("model", kv_tokens=4096)
answers: list[list[Completion]] = engine.generate([[1, 2]], SamplingParams(max_tokens=4))
with open_inprocess(TrainerConfig(model_path="model"), {"kv_tokens": 4096}) as (trainer, rollout):
    cycle = Cycle(trainer, rollout)
    cycle.to_rollout(version=1)
    cycle.to_train()
steps: int = recipes.load("tiny", ["steps=3"]).steps
"""


def run(*words: object, cwd: Path, **variables: str) -> str:
    """Return what a command prints; a failure shows both streams."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    } | variables
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of the repository, uncommitted changes included."""
    listed = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what lies about in the working tree has no part in it."""
    source, out = tmp_path_factory.mktemp("source"), ROOT / "dist"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-c", BUILD.format(kind="sdist"), out, cwd=source)
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist by the C compiler, offline."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    run(sys.executable, "-c", BUILD.format(kind="wheel"), sdist.parent, cwd=source)
    (built,) = sdist.parent.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment with the wheel that finds its dependencies in the project's own.

    A path file adds the project's site-packages. Python does not read the .pth files in a folder
    added this way, so the environment does not see the project's editable install.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def sources(tracked: list[str]) -> set[str]:
    """Return the files that an installed memsaver consists of."""
    kept = (".py", ".c", ".cpp", ".h", ".yaml", ".html", ".typed")
    return {
        name
        for name in tracked
        if name.startswith(tuple(f"{p}/" for p in PACKAGES)) and name.endswith(kept)
    }


def test_the_sdist_holds_the_sources_and_no_tests(sdist: Path, tracked: list[str]) -> None:
    with tarfile.open(sdist) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    beside = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert names >= sources(tracked) | beside
    assert not [name for name in names if name.startswith(("tests/", "docs/", "examples/"))]
    assert not [name for name in names if name.endswith(".so")]


def test_the_wheel_holds_the_sources_and_the_built_shim(wheel: Path, tracked: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    (shim,) = names - sources(tracked)
    assert shim.startswith("memsaver/native/shim-") and shim.endswith(".so")
    assert names >= sources(tracked)
    assert {"recipes/tiny.yaml", "recipes/config/shapes.yaml"} <= names
    assert "memsaver/native/cpu_hook.cpp" in names


def test_wheel_has_the_tag_that_auditwheel_proves(wheel: Path) -> None:
    if "CI" not in os.environ:
        pytest.importorskip("auditwheel")
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=ROOT)
    tag = wheel.stem.rpartition("-")[2]
    assert re.fullmatch(rf"manylinux_\d+_\d+_{platform.machine()}", tag) and f'"{tag}"' in shown


def test_what_is_imported_there_is_the_wheels(environment: Path, tmp_path: Path) -> None:
    code = f"import json; print(json.dumps([__import__(name).__file__ for name in {PACKAGES}]))"
    files = json.loads(run(environment / "bin" / "python", "-c", code, cwd=tmp_path))
    assert all(Path(file).is_relative_to(environment) for file in files), files


WITHOUT_A_COMPILER = """
import torch, memsaver
saver = memsaver.MemorySaver(device="cpu")
kv = saver.empty((1024, 16), torch.bfloat16, tag="kv_cache")
saver.pause("kv_cache")
assert saver.report().committed_bytes == 0
saver.resume("kv_cache")
kv.fill_(1)
try:
    with saver.region("weights"):
        pass
except memsaver.CompilerError as error:
    print(error)
"""


def test_wheel_needs_no_compiler_and_no_writable_cache_but_for_cpu_regions(
    environment: Path, tmp_path: Path
) -> None:
    python = environment / "bin" / "python"
    bare = {"PATH": "", "XDG_CACHE_HOME": "/dev/null"}
    told = run(python, "-c", WITHOUT_A_COMPILER, cwd=tmp_path, **bare)
    assert "install g++; or empty()" in told and "no compiler was found" in told


def test_command_and_module_tell_the_version_of_the_wheel(
    environment: Path, wheel: Path, tmp_path: Path
) -> None:
    for words in (["memsaver"], ["python", "-m", "memsaver"]):
        told = run(environment / "bin" / words[0], *words[1:], "--version", cwd=tmp_path)
        assert told == f"memsaver {wheel.name.split('-')[1]}\n"


def test_strict_mypy_accepts_a_users_script_and_finds_its_mistake(
    environment: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(USERS_SCRIPT)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--python-executable")
    run(*mypy, environment / "bin" / "python", script, cwd=tmp_path)
    script.write_text(USERS_SCRIPT.replace('"host"', '"hots"'))
    with pytest.raises(AssertionError, match=r'incompatible type "Literal\[.hots.\]"'):
        run(*mypy, environment / "bin" / "python", script, cwd=tmp_path)


def test_a_recipe_runs_there(environment: Path, tmp_path: Path) -> None:
    words = ["tiny", "steps=1", "eval.every=0"]
    words += ["loop.prompts_per_step=8", "loop.samples_per_prompt=4"]
    run(environment / "bin" / "memsaver", "run", *words, "--run-dir", "run", cwd=tmp_path)
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1 and row["mismatch_max"] < 5e-5
