"""The safetensors files of a Hugging Face directory, read by boxes of named tensors."""

import os
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rollout.model import Stored, checkpoint_files, is_unused, spellings
from trainer_bridge.errors import listed
from trainer_bridge.sync.boxes import Box

Shape = tuple[int, ...]


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
    """Boxes of the parameters in `path`, however its tensors are named and cut (`spellings`).

    Files are mapped, not read, until a box is asked for.
    """

    def __init__(self, path: str) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        self._ways: dict[str, list[Stored]] = {}
        for file_path in checkpoint_files(path):
            file: Any = safe_open(str(file_path), framework="pt", device="cpu")
            self._files |= {key: file for key in file.keys() if not is_unused(key)}  # noqa: SIM118

    def check(self, shapes: Mapping[str, Shape], ignore: Collection[str] = ()) -> None:
        """Finds these parameters. Raises a ValueError that lists every name that is missing,
        unknown or of another shape.
        """
        self._ways = {name: self._way(name, shape) for name, shape in shapes.items()}
        parts = chain.from_iterable(self._ways.values())
        wanted = {stored.name: stored.shape for stored in parts}
        named = {name: file for name, file in self._files.items() if name not in ignore}
        found = {name: tuple(file.get_slice(name).get_shape()) for name, file in named.items()}
        if problems := misfits(wanted, found):
            raise ValueError(
                f"weights in {self.path!r} do not fit its config.json: {listed(problems)}"
            )

    def box(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Returns the elements from `start` to `start + shape` of a parameter that was checked, on
        the CPU, in the file's dtype.
        """
        asked = Box(tuple(start), tuple(shape))
        parts = [(Box(stored.start, stored.box), stored) for stored in self._ways[name]]
        mine = [(stored, box, common) for box, stored in parts if (common := box.intersect(asked))]
        first = self._read(*mine[0])
        if len(mine) == 1:
            return first
        whole = torch.empty(asked.shape, dtype=first.dtype)
        for stored, box, common in mine:
            whole[common.within(asked)] = self._read(stored, box, common)
        return whole

    def _way(self, name: str, shape: Shape) -> list[Stored]:
        ways = spellings(name, shape)
        return next((way for way in ways if way[0].name in self._files), ways[0])

    def _read(self, stored: Stored, box: Box, common: Box) -> Tensor:
        """Returns what a tensor, whose box in its parameter is `box`, has of `common`."""
        lacking = len(box.shape) - len(stored.shape)
        read = self._files[stored.name].get_slice(stored.name)[common.within(box)[lacking:]]
        return read.view(common.shape)
