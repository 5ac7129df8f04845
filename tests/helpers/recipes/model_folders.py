"""Folders of models without weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from memsaver.ops.hash import hash_text
from recipes.setup.model_files import describe_random_model, toy_tokenizer

_ALL = tempfile.TemporaryDirectory()


def model_folder(fields: dict[str, Any]) -> Path:
    """Return a folder with the config of these fields, which lives as long as the process."""
    folder = Path(_ALL.name, str(hash_text(json.dumps(fields))))
    if not folder.exists():
        folder.mkdir()
        describe_random_model(fields, toy_tokenizer([]), folder)
    return folder
