"""Commands that the pages show: options exist, packaged recipes and make targets too; nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from recipes.cli import parse
from recipes.errors import RecipeError
from recipes.loading import find_recipe, load
from tests.helpers.docs.pages import PAGES, ROOT, blocks, name_of

MEMSAVER = re.compile(r"^(?:\S*/)?memsaver ((?:run|plan|report|fetch|doctor)\b.*)$")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
TARGETS |= set(re.findall(r"bench-[\w-]+", (ROOT / "Makefile").read_text()))


def lines(page: Path) -> list[tuple[int, str]]:
    """(line number, text) of the lines of blocks that are shells' or of no language, without what follows `#`."""
    found = []
    for block in blocks(page):
        if block.language in ("", "bash", "sh"):
            found += [(block.line + i, line.strip()) for i, line in enumerate(block.text.splitlines())]
    return found


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Words of `memsaver` commands that are meant to be typed: not a synopsis, which has brackets or bars."""
    found = []
    for number, line in lines(page):
        command = MEMSAVER.match(re.split(r"\s+#|\s{3,}", line)[0])
        if command and not re.search(r"[][|]|\.\.\.$", command[1]):
            found.append((number, shlex.split(command[1])))
    return found


def saved(page: Path) -> dict[str, str]:
    """Files that the reader is told to save: name -> content."""
    names = re.findall(r"[Ss]ave this as `([\w.]+)`", page.read_text())
    return dict(zip(names, [block.text for block in blocks(page, "yaml")], strict=False))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_memsaver_commands_parse(page: Path) -> None:
    for number, words in commands(page):
        try:
            parsed = parse(words)
        except SystemExit:
            pytest.fail(f"{name_of(page)}:{number}: memsaver {' '.join(words)}: not a command of this version")
        named = [word for word in getattr(parsed, "words", [])[:1] if "=" not in word and not word.isupper()]
        for recipe in named:
            known = recipe in saved(page) or (ROOT / recipe).is_file() or find_recipe(recipe)
            assert known, f"{name_of(page)}:{number}: {recipe}"


def test_the_first_recipe_loads_and_its_mistake_reads_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "first-steps.md"
    ((name, text),) = saved(page).items()
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load(name).steps == 20
    with pytest.raises(RecipeError) as raised:
        load(name, ["grpo.samples_per_prompt=1"])
    assert f"memsaver: {raised.value}" in page.read_text()


def test_some_commands_are_shown() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    shown = {word for _, line in lines(page) for word in re.findall(r"^make ([\w-]+)", line)}
    shown |= set(re.findall(r"`make ([\w-]+)", page.read_text()))
    assert shown <= TARGETS


def test_the_readmes_links_lead_somewhere() -> None:
    """Those of docs/ are checked by `mkdocs build --strict`."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
