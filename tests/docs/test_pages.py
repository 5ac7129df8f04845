"""Tests of the Markdown pages: code, commands, make targets, public names, table cells, length."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from recipes.cli import parse
from recipes.config.load import find_recipe, load
from recipes.config.recipe import FIELDS, is_section
from recipes.errors import RecipeError
from tests.helpers.docs.pages import PAGES, ROOT, blocks, name_of
from tests.helpers.docs.preludes import PRELUDES, prelude

RUNNABLE = {
    page: [
        block for block in blocks(page, "python") if block.not_run is None and block.snippet is None
    ]
    for page in PAGES
}
LONGEST_CELL = 200
COMMANDS = "run|plan|samples|export|evaluate|report|trace-mismatch|fetch|doctor|keys"
MEMSAVER = re.compile(rf"^(?:\S*/)?memsaver ((?:{COMMANDS})\b.*)$")
TARGETS = set(re.findall(r"^([\w-]+):|\b(bench-[\w-]+)", (ROOT / "Makefile").read_text(), re.M))
TARGETS = {name for pair in TARGETS for name in pair}
PACKAGES = ["memsaver", "kvcache", "rollout", "trainer_bridge", "recipes"]


@pytest.mark.parametrize("page", [page for page, code in RUNNABLE.items() if code], ids=name_of)
def test_python_blocks_of_page_run_in_order_in_one_namespace(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with prelude(name_of(page), tmp_path) as names:
        names["__name__"] = "page"
        for block in RUNNABLE[page]:
            exec(block.compile(), names)


def test_blocks_that_are_not_run_are_few_and_compile_and_state_a_reason() -> None:
    left_out = 0
    for block in (block for page in PAGES for block in blocks(page, "python")):
        if block.not_run is not None:
            assert len(block.not_run.split()) >= 3
            block.compile()
            left_out += 1
    assert left_out <= 4
    assert {name_of(page) for page, code in RUNNABLE.items() if code} >= set(PRELUDES)


def test_pages_show_the_example_files_that_they_link() -> None:
    shown = [block for page in PAGES for block in blocks(page) if block.snippet is not None]
    assert len(shown) >= 8
    for block in shown:
        where = f"{name_of(block.page)}:{block.line}; run python -m tests.helpers.docs.pages"
        assert block.text == block.expected, where


def lines(page: Path) -> list[tuple[int, str]]:
    """Return (line number, text) for each line of the page's shell and unlabeled blocks."""
    return [
        (block.line + i, line.strip())
        for block in blocks(page)
        if block.language in ("", "bash", "sh")
        for i, line in enumerate(block.text.splitlines())
    ]


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Return the line number and words of each `memsaver` command that a reader can type.

    A synopsis, which has brackets or bars, is left out.
    """
    typed = []
    for number, line in lines(page):
        command = MEMSAVER.match(re.split(r"\s+#|\s{3,}", line)[0])
        if command and not re.search(r"[][|]|\.\.\.$", command[1]):
            typed.append((number, shlex.split(command[1])))
    return typed


def saved(page: Path) -> dict[str, str]:
    """Return the content of the files that the page tells its reader to save, by name."""
    names = re.findall(r"[Ss]ave this as `([\w.]+)`", page.read_text())
    return dict(zip(names, [block.text for block in blocks(page, "yaml")], strict=False))


def test_memsaver_commands_parse() -> None:
    shown = [(page, number, words) for page in PAGES for number, words in commands(page)]
    assert len(shown) >= 5
    for page, number, words in shown:
        try:
            parsed = parse(words)
        except SystemExit:
            line = f"{name_of(page)}:{number}: memsaver {' '.join(words)}"
            pytest.fail(f"{line}: not a command of this version")
        recipes = getattr(parsed, "words", [])[: words[0] != "evaluate"]
        named = [word for word in recipes if "=" not in word and not word.isupper()]
        shown_files = {Path(block.snippet).name for block in blocks(page) if block.snippet}
        for recipe in named:
            known = (
                recipe in saved(page)
                or recipe in shown_files
                or (ROOT / recipe).is_file()
                or find_recipe(recipe)
            )
            assert known, f"{name_of(page)}:{number}: {recipe}"


@pytest.mark.parametrize("command", ["", *COMMANDS.split("|")])
def test_help_of_command_fits_into_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse([*command.split(), "--help"])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) > 3 and not [line for line in shown if len(line) > 80]


def test_recipe_of_first_steps_loads_and_its_mistake_prints_the_error_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "first-steps.md"
    ((name, text),) = saved(page).items()
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load(name).steps == 20
    with pytest.raises(RecipeError) as raised:
        load(name, ["loop.samples_per_prompt=0"])
    assert f"memsaver: {raised.value}" in page.read_text()


def test_keys_on_pages_are_keys_of_recipes() -> None:
    code = (  # of trainers, models, tasks and savers
        {"trainer.compute_log_prob", "trainer.model", "trainer.sync_weights", "model.safetensors"}
        | {"task.train", "task.score", "engine.saver", "model.lora_rank"}
    )
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        spans = "\n".join(re.findall(r"`([^`\n]+)`", prose))
        named = set(re.findall(r"(?<![\w./-])([a-z]+\.[a-z_0-9]+)(?=[=: ]|$)", spans, re.M))
        keys = {key for key in named if is_section(key.partition(".")[0])}
        assert keys - code <= FIELDS.keys(), name_of(page)


def test_algorithms_of_losses_page_load_and_every_key_has_an_effect() -> None:
    parts = [yaml.safe_load(block.text) for block in blocks(ROOT / "docs" / "losses.md", "yaml")]
    assert len(parts) >= 7
    for part in parts:
        values = {f"{name}.{key}": value for name in part for key, value in part[name].items()}
        recipe = load("tiny", [f"{key}={value}" for key, value in values.items()])
        assert {key: recipe.value(key) for key in values} == values


def test_make_targets_of_pages_and_links_outside_of_docs_exist() -> None:
    # `mkdocs build --strict` checks the links of docs/
    for page in PAGES:
        shown = {word for _, line in lines(page) for word in re.findall(r"^make ([\w-]+)", line)}
        assert shown | set(re.findall(r"`make ([\w-]+)", page.read_text())) <= TARGETS, page
    for page in PAGES[:2]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), target


def test_index_of_test_helpers_lists_every_module() -> None:
    folder = ROOT / "tests" / "helpers"
    listed = re.findall(r"^\| `([\w/]+)` \|", (folder / "README.md").read_text(), re.M)
    files = [*folder.glob("*.py"), *folder.glob("*/*.py")]
    modules = [path.relative_to(folder).with_suffix("") for path in files]
    assert sorted(listed) == sorted(str(path) for path in modules if path.name != "__init__")


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_lists_every_public_name_of_package(package: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    entries = re.findall(r"^::: ([\w.]+)$", page, re.M)
    assert len(entries) == len(set(entries))
    assert set(importlib.import_module(package).__all__) <= {
        entry.rpartition(".")[2] for entry in entries
    }
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name) or importlib.import_module(entry), (
            entry
        )


def test_versions_page_states_lower_bounds_of_pyproject() -> None:
    stated = re.findall(r'"([a-z]+)(?:\[\w+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs/versions.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) and later \|", page, re.M)
    assert len(rows) == 8 and {(name.lower(), bound) for name, bound in rows} <= {*stated}


def cells(page: Path) -> list[tuple[int, str]]:
    """Return (line number, rendered text) for each table cell: links and images by their text."""
    inside = False  # a fenced block
    texts = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if re.match(r" *```", line):
            inside = not inside
        elif not inside and re.match(r" *\|.*\|\s*$", line):
            rendered = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", line.strip())
            texts += [(number, cell.strip(" *`")) for cell in re.split(r"(?<!\\)\|", rendered)]
    return texts


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_table_cells_of_page_are_short(page: Path) -> None:
    long = {number: len(cell) for number, cell in cells(page) if len(cell) > LONGEST_CELL}
    assert not long, f"{name_of(page)}: characters of a cell by line"


def test_measurements_stay_within_200_lines() -> None:
    assert len((ROOT / "docs" / "benchmarks.md").read_text().splitlines()) <= 200
