"""Tests of the install lines: the extra `all` brings what pages show and packages import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from memsaver.system import hidden_packages
from tests.helpers.docs.pages import PAGES, ROOT, blocks, name_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = ("memsaver", *hidden_packages.PACKAGES)
# Modules whose names are not those of their distributions.
NAMES = {"pyyaml": "yaml", "cuda_bindings": "cuda", "pyzmq": "zmq", "mlflow_skinny": "mlflow"}
# An environment has these before memsaver, or a user installs them alone: no extra brings them.
OTHERS = {"vllm", "sglang", "verl", "trl", "peft", "omegaconf", "trackio", "swanlab"}
OTHERS |= {"agents", "langgraph", "langchain_core", "langchain_openai"}
# These come with transformers, pydantic, matplotlib, fastapi and renderers.
OTHERS |= {"tokenizers", "pydantic_core", "cycler", "starlette", "openai"}
# What commands and recipes import because of a word in them.
WORDS = {
    r"memsaver fetch": "gguf",
    r"memsaver report": "jinja2",
    r"driver[:=] ?ray|n_gpus_per_node|cluster\.address": "ray",
    r"reasoning_gym:": "reasoning_gym",
    r"\.parquet\b|task\.subset": "datasets",
    r"rewards[:=] ?\[?math\b": "math_verify",
    r"adamw_8bit": "bitsandbytes",
    r"trackers.*tensorboard|tensorboard --": "tensorboard",
    r"trackers.*wandb": "wandb",
    r"trackers.*mlflow": "mlflow",
    r"trackers.*prometheus": "prometheus_client",
}


def modules(requirements: Iterable[str]) -> set[str]:
    """Return the modules of distributions, also of those that memsaver's own extras bring."""
    found = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "memsaver":
            found |= modules(line for extra in extras.split(",") for line in EXTRAS[extra])
        else:
            plain = name.lower().replace("-", "_")
            found.add(NAMES.get(plain, plain))
    return found


def imported(source: str) -> set[str]:
    """Return the packages of others that a source file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    tops = {name.partition(".")[0] for name in names}
    return tops - sys.stdlib_module_names - {*PACKAGES, "examples", "__future__"}


def needed(page: Path) -> set[str]:
    """Return the modules that a page's code, its example files and its commands need."""
    code = {block.text for block in blocks(page, "python")}
    linked = set(re.findall(r"examples/[\w./-]+\.(?:py|yaml)", page.read_text()))
    code |= {(ROOT / name).read_text() for name in linked if name.endswith(".py")}
    typed = [block.text for block in blocks(page) if block.language != "python"]
    typed += [(ROOT / name).read_text() for name in linked if name.endswith(".yaml")]
    own = {Path(name).stem for name in linked}
    of_code = set().union(*map(imported, code)) - own
    return of_code | {name for word, name in WORDS.items() if re.search(word, "\n".join(typed))}


ALWAYS = modules(["memsaver[all]", *PROJECT["dependencies"]])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_needs_what_all_brings_and_the_extras_that_it_names(page: Path) -> None:
    text = page.read_text()
    named = [extra for extra in EXTRAS if re.search(rf"memsaver\[{extra}\]|`{extra}`", text)]
    alone = set(re.findall(r"pip install ([\w-]+)", text))
    brought = ALWAYS | modules(f"memsaver[{extra}]" for extra in named) | modules(alone) | OTHERS
    assert needed(page) <= brought


def test_packages_import_what_an_extra_brings() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = set().union(*(imported(path.read_text()) for path in files))
    assert found <= ALWAYS | modules(line for lines in EXTRAS.values() for line in lines) | OTHERS
    assert {"ray", "bitsandbytes", "zmq", "gguf"} <= found - modules(PROJECT["dependencies"])


def test_install_lines_are_one_and_take_the_versions_of_gpu_tests() -> None:
    pages = [blocks(ROOT / name, "bash")[0].text for name in ("README.md", "docs/install.md")]
    docker = (ROOT / "Dockerfile").read_text().replace("--no-cache-dir ", "")
    for text in (*pages, docker.replace("/clone/", "memsaver/")):
        assert re.search(r"pip install -c memsaver/constraints\.txt 'memsaver/\[all\]'", text)
    (torch,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
    (row,) = re.findall(r"^\| torch \|.*\|$", (ROOT / "docs/versions.md").read_text(), re.M)
    assert row.split("|")[-2].strip() == torch
