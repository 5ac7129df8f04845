"""Model directories whose config.json is edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.model.loading import load_model_config
from tests.helpers.models import KINDS, build_tiny


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in remove} | changes
    (path / "config.json").write_text(json.dumps(config))


def assert_refused(path: Path, kind: str, overrides: dict[str, Any], changes: dict[str, Any], match: str) -> None:
    """A model of this kind and these overrides is understood; with the changes it is refused, by name."""
    build_tiny(kind, **overrides).config.save_pretrained(str(path))
    remove = () if kind == "qwen3_next" else ("layer_types",)  # where it follows from other keys
    edit_config(path, remove=remove, architectures=[KINDS[kind][1].__name__])
    load_model_config(path)
    edit_config(path, **changes)
    with pytest.raises(ValueError, match=match):
        load_model_config(path)
