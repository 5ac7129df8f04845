"""The page itself: sections put into the template, with style and script inside it."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from recipes.watch.report.chart import Chart
from recipes.watch.report.reading import RunRecord
from recipes.watch.report.sections import Missing, make_sections
from recipes.watch.report.tables import Table, key_figures

FOLDER = Path(__file__).parent / "page"


def render_page(run: RunRecord) -> str:
    """HTML that holds everything it shows."""
    engine = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    engine.tests |= {
        "chart": lambda block: isinstance(block, Chart),
        "table": lambda block: isinstance(block, Table),
        "missing": lambda block: isinstance(block, Missing),
    }
    return engine.get_template("page.html").render(
        name=run.path.resolve().name,
        about=_about(run),
        figures=key_figures(run),
        gaps=run.gaps,
        sections=make_sections(run),
        recipe=run.recipe_text,
        svg=Markup,
        style=Markup((FOLDER / "page.css").read_text()),
        script=Markup((FOLDER / "page.js").read_text()),
    )


def _about(run: RunRecord) -> str:
    """One line on what was run."""
    task = (run.recipe.get("task") or {}).get("name")
    words = [run.recipe.get("algorithm"), task, run.recipe.get("driver"), run.recipe.get("device")]
    begun = run.environments[0].get("date") if run.environments else None
    return " · ".join(str(word) for word in [*words, begun] if word)
