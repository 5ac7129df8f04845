"""`memsaver report RUN [--out FILE.html]`."""

from __future__ import annotations

from pathlib import Path

from memsaver.common.files import replace_text
from recipes.errors import RecipeError, one_line, writable
from recipes.watch.report.reading import read_run


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes one HTML page about the run in `run_dir` and returns its path: `out`, or report.html in the folder.

    The page needs no other file and no network. Of a run that was killed it shows what there is and says what is
    missing. RecipeError: no run there, nowhere to write, or matplotlib is not installed.
    """
    run = read_run(run_dir)
    try:
        from recipes.watch.report.page import render_page
    except ImportError as error:
        raise RecipeError(f"report: {one_line(error)}; run: pip install 'memsaver[plots]'") from None
    file = out or run_dir / "report.html"
    html = render_page(run)
    with writable(f"--out {file}"):
        replace_text(file, html)
    return file
