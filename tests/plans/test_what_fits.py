"""The table of docs/what-fits.md is what the planner says."""

from __future__ import annotations

import pytest

from tests.helpers.docs.fitting import MODELS, PAGE, ROW, WAYS, cell

ALWAYS = {("qwen2.5-0.5b", "lora.rank=32"), ("qwen2.5-7b", "trainer.optimizer_offload=true")}
ROWS = {match[1]: match[0].split(" | ")[1:] for match in ROW.finditer(PAGE.read_text())}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=[pytest.mark.extended] * ((model, way) not in ALWAYS))
        for model in MODELS
        for way in WAYS
    ],
)
def test_cell_of_the_table_is_planned(model: str, way: str) -> None:
    assert ROWS[model][WAYS.index(way)].rstrip(" |") == cell(model, way)
