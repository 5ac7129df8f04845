"""The safetensors files of a Hugging Face directory, read by boxes of named tensors."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from rollout.model import checkpoint_files
from trainer_bridge.errors import listed

Shape = tuple[int, ...]
_DERIVED = ".rotary_emb.inv_freq"  # some old checkpoints hold it; the model computes it


def check_directory(path: str) -> None:
    """Raises a ValueError unless `path` holds a config.json."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        rule = "is no Hugging Face model directory: no config.json"
        raise ValueError(f"model_path={path!r} {rule}; check the path")


def misfits(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """Lists every name that is missing, unknown or of another shape than the model has."""
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"unknown {name}" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        if found[name] != wanted[name]:
            problems.append(f"{name} has shape {found[name]}, the model {wanted[name]}")
    return sorted(problems)


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

    def check(self, shapes: Mapping[str, Shape], ignore: Collection[str] = ()) -> None:
        """Raise a ValueError that lists every name that is missing, unknown or of another shape."""
        named = {name: file for name, file in self._files.items() if name not in ignore}
        found = {name: tuple(file.get_slice(name).get_shape()) for name, file in named.items()}
        if problems := misfits(shapes, found):
            raise ValueError(
                f"weights in {self.path!r} do not fit its config.json: {listed(problems)}"
            )

    def box(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Returns the elements from `start` to `start + shape` of a tensor, on the CPU, in the
        file's dtype.
        """
        ranges = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        return self._files[name].get_slice(name)[ranges]
