"""The environment of README's install line, made by the Dockerfile's instructions without docker.

`make environment` runs the first test, which downloads about 1 GB, and `make test-all` both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.docs.pages import ROOT, typed

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]
PAGE = ROOT / "docs" / "how-to" / "train.md"
FULL_RUN = "memsaver run recipe.yaml --run-dir first"
INSTRUCTION = re.compile(r"^(RUN|ENV|COPY) (?!apt-get)(.+)$", re.M)


def run(script: str, folder: Path, prefix: Path) -> str:
    """Return what a shell prints in a folder where a user has activated the environment."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"PATH": f"{prefix}/bin:{variables['PATH']}", "XDG_CACHE_HOME": f"{prefix}/cache"}
    variables.pop("HF_HUB_OFFLINE", None)
    command = ["sh", "-ec", script]
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, f"{script}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the Dockerfile's instructions below an empty folder; without a GPU, with torch for it.

    Packages of Debian are left out, and torch is the one of `make setup`.
    """
    root = tmp_path_factory.mktemp("root")
    (root / "opt").mkdir()
    (root / "clone").mkdir()
    script = ""
    for word, rest in INSTRUCTION.findall((ROOT / "Dockerfile").read_text()):
        rest = re.sub(r"(?<!\w)/(opt|clone)/", rf"{root}/\1/", rest)
        script += {"RUN": "", "ENV": "export ", "COPY": f"cd {ROOT}; cp -r "}[word] + rest + "\n"
    (torch,) = re.findall(r"^CPU_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    limits = root / "clone" / "constraints.txt"
    script = script.replace("\npip", f"\nsed -i 's/^torch==.*/{torch}/' {limits}\npip", 1)
    doctor = run(script, root, root / "opt" / "memsaver")
    assert re.search("needs? attention", doctor), doctor
    yield root / "opt" / "memsaver"
    shutil.rmtree(root)


def test_dockerfile_makes_an_environment_in_which_a_recipe_runs(
    prefix: Path, tmp_path: Path
) -> None:
    small = "steps=1 eval.every=0 loop.prompts_per_step=8 loop.samples_per_prompt=4"
    run(f"memsaver run tiny --run-dir run {small}", tmp_path, prefix)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_commands_of_train_page_work_as_typed(prefix: Path, tmp_path: Path) -> None:
    """Run all commands but the one of 150 steps; the page's short run trains in its place."""
    for file in (ROOT / "examples" / "train").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    told = [run(line, tmp_path, prefix) for line in typed(PAGE) if line != FULL_RUN]
    assert told[-1].strip(), f"the model that {PAGE.name} exports answers nothing"
