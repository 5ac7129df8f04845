"""The table of docs/what-fits.md, whose numbers are planned.

`python -m tests.helpers.docs.fitting` writes it into the page, which takes some minutes.
"""

from __future__ import annotations

import math
import re
from functools import cache

from recipes.config.load import load
from recipes.planner.command import plan_of
from recipes.planner.memory_plan import MemoryPlan
from tests.helpers.docs.pages import ROOT

PAGE = ROOT / "docs" / "what-fits.md"
MODELS = ("smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3.1-8b")
WAYS = (
    "trainer.dtype=float32",
    "trainer.optimizer=adamw_8bit",
    "trainer.optimizer_offload=true",
    "lora.rank=32",
)
CARDS = {24: 22.0, 48: 44.0, 80: 79.1}
"""GiB that cards of a nominal size offer at least."""

LEAST = (
    "trainer.micro_batch_size=1 trainer.keep_unsharded=false trainer.cuda_graphs=false "
    "cycle.resident=[] cycle.overlap=[]"
)
SETTINGS = f"engine.kv_tokens=null sampling.max_tokens=1024 exact=false {LEAST}"
PROMPT_TOKENS = 512
GIB = 2**30
ROW = re.compile(r"^\| `([\w.-]+)` \|.*\|$", re.M)


def row(model: str) -> str:
    """Return the row of a model."""
    return f"| `{model}` | {' | '.join(cell(model, way) for way in WAYS)} |"


@cache
def cell(model: str, way: str) -> str:
    """Return the smallest card on which a model can be trained in this way, and the GiB."""
    plan = plan_for(model, way)
    spare = plan.gpu.total - plan.room
    gib = (max(stage.device_bytes for stage in plan.rows) + spare) / GIB
    fitting = [f"**{size} GB**" for size, offered in CARDS.items() if gib <= offered]
    host = f", host {plan.host_bytes / GIB:.0f}" if "offload" in way else ""
    return f"{(fitting or ['none'])[0]}: {math.ceil(gib * 10) / 10:.1f}{host}"


def plan_for(model: str, way: str) -> MemoryPlan:
    """Plan on a GPU with room for all rows, so that no cached memory is given up."""
    keys = [f"model.shape={model}", "trainer.activation_checkpointing=layers", way]
    recipe = load("qwen2.5-0.5b", [*keys, *SETTINGS.split()])
    return plan_of(recipe, model, gpu="h200-141gb", prompt_tokens=PROMPT_TOKENS)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(ROW.sub(lambda match: row(match[1]), text))
