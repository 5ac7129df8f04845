"""Changes of model directories."""

import json
from pathlib import Path
from typing import Any


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Remove and change keys of a directory's config.json."""
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in remove} | changes
    (path / "config.json").write_text(json.dumps(config))
