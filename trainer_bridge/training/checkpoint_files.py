"""The safetensors files of a Hugging Face directory, read by boxes of named tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from rollout.model import checkpoint_files

_DERIVED = ".rotary_emb.inv_freq"  # some old checkpoints hold it; the model computes it


def check_directory(path: str) -> None:
    """Raises a ValueError unless `path` holds a config.json."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        rule = "is no Hugging Face model directory: no config.json"
        raise ValueError(f"model_path={path!r} {rule}; check the path")


class CheckpointFiles:
    """Names, shapes and boxes of the tensors in `path`.

    Files are mapped, not read, until a box is asked for.
    """

    def __init__(self, path: str) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file_path in checkpoint_files(path):
            file: Any = safe_open(str(file_path), framework="pt", device="cpu")
            self._files |= {key: file for key in file.keys() if not key.endswith(_DERIVED)}  # noqa: SIM118

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignore: Collection[str] = ()) -> None:
        """Raise a ValueError that lists every name that is missing, unknown or of another shape."""
        problems = [f"missing {name}" for name in shapes if name not in self._files]
        problems += [
            f"unknown {name}" for name in self._files if name not in shapes and name not in ignore
        ]
        for name in shapes.keys() & self._files.keys():
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shapes[name]:
                problems.append(f"{name} has shape {found}, the model {shapes[name]}")
        if problems:
            text = "; ".join(sorted(problems)[:20])
            raise ValueError(f"weights in {self.path!r} do not fit its config.json: {text}")

    def box(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Returns the elements from `start` to `start + shape` of a tensor, on the CPU, in the
        file's dtype.
        """
        ranges = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        return self._files[name].get_slice(name)[ranges]
