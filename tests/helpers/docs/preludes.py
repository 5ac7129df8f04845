"""Generators of the names that a page's Python blocks use without defining them, one per page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import memsaver
import memsaver.compat
from tests.helpers.rollout.adapters import SHAPES, save_adapter
from tests.helpers.trainer_bridge.models import write_model

Names = dict[str, Any]
Prelude = Callable[[Path], Iterator[Names]]


@contextmanager
def prelude(page: str, folder: Path) -> Iterator[Names]:
    """Provide the names for a page such as "docs/weight-sync.md", and clean up afterwards."""
    yield from PRELUDES.get(page, _nothing)(folder)


def _nothing(folder: Path) -> Iterator[Names]:
    yield {}


def _model(folder: Path) -> Iterator[Names]:
    """Provide the path of a tiny Qwen3 and two prompts."""
    yield {"path": write_model(folder / "model"), "prompts": [[1, 2, 3], [4, 5]]}


def _served(folder: Path) -> Iterator[Names]:
    """Provide the path of a tiny model, and the URL where it is served."""
    from tests.helpers.recipes.models import save_byte_model
    from tests.helpers.rollout.serving import serving

    path = save_byte_model(folder)
    with serving(path, model="mine", keys=()) as served:
        yield {"path": path, "url": f"{served.url}/v1"}


def _adapters(folder: Path) -> Iterator[Names]:
    """Provide what `_model` does, and two adapters of the model."""
    from transformers import AutoModelForCausalLM

    for names in _model(folder):
        model = AutoModelForCausalLM.from_pretrained(names["path"])
        for seed, name in enumerate(("math", "code")):
            save_adapter(folder / "adapters" / name, model, seed, **SHAPES[seed])
        yield names


def _weight_sync(folder: Path) -> Iterator[Names]:
    """Provide a trainer's configuration, a saver and an engine without weights."""
    from rollout import Engine
    from tests.helpers.trainer_bridge.models import config
    from trainer_bridge import Trainer

    path = write_model(folder / "model")
    saver = memsaver.MemorySaver(device="cpu")
    engine = Engine.from_pretrained(path, kv_tokens=64, load_weights=False)
    names: Names = {
        "Trainer": Trainer,
        "path": path,
        "config": config(path),
        "saver": saver,
        "engine": engine,
    }
    yield names
    names["trainer"].close()
    saver.close()


def _other_trainers(folder: Path) -> Iterator[Names]:
    """Provide a model with torchtitan's names, an adapter to Hugging Face's, and an engine."""
    from types import SimpleNamespace

    from transformers import AutoModelForCausalLM

    from rollout import Engine

    path = write_model(folder / "model")
    ours = AutoModelForCausalLM.from_pretrained(path)
    yield {
        "model": SimpleNamespace(
            named_parameters=lambda: [(f"titan.{n}", p) for n, p in ours.named_parameters()]
        ),
        "adapter": SimpleNamespace(
            to_hf=lambda named: {n.removeprefix("titan."): p for n, p in named.items()}
        ),
        "rollout": (rollout := Engine.from_pretrained(path, kv_tokens=64, load_weights=False)),
    }
    assert rollout.served_version() == 1
    rollout.saver.close()


def _compat(folder: Path) -> Iterator[Names]:
    yield {}
    memsaver.compat.uninstall()


PRELUDES: dict[str, Prelude] = {
    "README.md": _model,
    "docs/weight-sync.md": _weight_sync,
    "docs/compat.md": _compat,
    "docs/how-to/adapters.md": _adapters,
    "docs/how-to/async-engine.md": _model,
    "docs/how-to/decoding.md": _model,
    "docs/how-to/own-loop.md": _model,
    "docs/how-to/agents.md": _served,
    "docs/how-to/serve.md": _served,
    "docs/how-to/other-trainers.md": _other_trainers,
    "docs/how-to/own-model.md": _model,
    "docs/how-to/two-engines.md": _model,
}
