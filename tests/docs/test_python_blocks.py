"""Every Python block of the pages: run, in the order of its page and in one namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.docs.pages import PAGES, ROOT, blocks, name_of
from tests.helpers.docs.preludes import PRELUDES, prelude

RUNNABLE = {
    page: [block for block in blocks(page, "python") if block.not_run is None and block.snippet is None]
    for page in PAGES
}


@pytest.mark.parametrize("page", [page for page, found in RUNNABLE.items() if found], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with prelude(name_of(page), tmp_path) as names:
        names["__name__"] = "page"
        for block in RUNNABLE[page]:
            exec(block.compile(), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_what_is_not_run_is_python_all_the_same_and_has_a_reason(page: Path) -> None:
    for block in blocks(page, "python"):
        if block.snippet is not None:
            assert (ROOT / block.snippet).is_file(), f"{name_of(page)}:{block.line} shows {block.snippet}"
        elif block.not_run is not None:
            assert len(block.not_run.split()) >= 3
            block.compile()


def test_few_blocks_are_not_run() -> None:
    every = [block for page in PAGES for block in blocks(page, "python")]
    assert len([block for block in every if block.not_run]) <= 4


def test_every_prelude_has_its_page() -> None:
    assert {name_of(page) for page, found in RUNNABLE.items() if found} >= set(PRELUDES)
