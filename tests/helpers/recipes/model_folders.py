"""Folders of models without weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from memsaver.ops.hash import hash_text
from recipes.config.sections import shapes
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from recipes.tasks.toy import TOY_WORDS

_ALL = tempfile.TemporaryDirectory()


def model_folder(fields: dict[str, Any]) -> Path:
    """Return a folder with the config of these fields, which lives as long as the process."""
    folder = Path(_ALL.name, str(hash_text(json.dumps(fields))))
    if not folder.exists():
        folder.mkdir()
        describe_random_model(fields, toy_tokenizer([]), folder)
    return folder


def describe_shapes(folder: Path) -> Path:
    """Write for each shape a folder with its config and a checkpoint without tensors."""
    tokenizer = toy_tokenizer(TOY_WORDS)
    for name, fields in shapes().items():
        describe_random_model(fields, tokenizer, folder / name)
        save_file({}, folder / name / "model.safetensors")  # A run checks that the file exists.
    return folder
