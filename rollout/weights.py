"""The weight store: one arena under tag `weights`, a manifest of what lies where, and whether it is defined."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memsaver.ops.digest import Digest
from memsaver.rounding import round_up
from rollout.model.params import Group
from rollout.tags import WEIGHTS
from rollout.types import Manifest, ModuleTensor, ParamSlice

if TYPE_CHECKING:
    from memsaver import MemorySaver

ALIGNMENT = 256  # bytes: whole cache lines and the vector loads of every kernel
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")  # buffers of old checkpoints


def _align(nbytes: int) -> int:
    return round_up(nbytes, ALIGNMENT)


def arena_nbytes(groups: Sequence[Group], dtype: torch.dtype) -> int:
    """Bytes of the arena that holds `groups`, every group aligned."""
    return sum(_align(sum(math.prod(p.shape) for p in group.params) * dtype.itemsize) for group in groups)


def build_manifest(groups: Sequence[Group], aliases: dict[str, str], dtype: torch.dtype, base: int = 0) -> Manifest:
    """Lay `groups` out from byte `base` (a multiple of ALIGNMENT) of the tag's arena. Pure: no memory is touched."""
    assert base % ALIGNMENT == 0
    name = str(dtype).removeprefix("torch.")
    slices: list[ParamSlice] = []
    modules: dict[str, ModuleTensor] = {}
    offset, index = base, 0
    for group in groups:
        offset = _align(offset)
        first = offset
        for param in group.params:
            slices.append(
                ParamSlice(
                    name=param.name,
                    offset=offset,
                    shape=param.shape,
                    dtype=name,
                    global_shape=param.shape,
                    start=(0,) * len(param.shape),
                    index_base=index,
                )
            )
            offset += math.prod(param.shape) * dtype.itemsize
            index += math.prod(param.shape)
        if group.fused is not None:
            rows = sum(param.shape[0] for param in group.params)
            modules[group.fused] = ModuleTensor(offset=first, shape=(rows, *group.params[0].shape[1:]), dtype=name)
    layout = json.dumps(
        [[asdict(s) for s in slices], aliases, {k: asdict(m) for k, m in modules.items()}, offset], sort_keys=True
    )
    layout_hash = hashlib.sha256(layout.encode()).hexdigest()
    return Manifest(
        nbytes=offset, slices=tuple(slices), aliases=dict(aliases), modules=modules, layout_hash=layout_hash
    )


class WeightStore:
    """Owns the arena and says whether its content is some version of the weights.

    `version` is None while the content is undefined; `undefined_reason` then says why. `last_version` is the last one
    that was defined. Views handed out by `tensor` stay valid over pause and resume (same
    address), not their content.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        aliases: dict[str, str],
        dtype: torch.dtype,
        saver: "MemorySaver",
        tag: str = WEIGHTS,
    ) -> None:
        self.tag = tag
        self._arena = saver.empty((arena_nbytes(groups, dtype),), torch.uint8, tag=tag)
        self._base = saver.offset_of(self._arena)
        self.manifest = build_manifest(groups, aliases, dtype, self._base)
        self.param_nbytes = sum(math.prod(p.shape) for group in groups for p in group.params) * dtype.itemsize
        self._slices = {piece.name: piece for piece in self.manifest.slices}
        self.version: int | None = None
        self.last_version = 0
        self.undefined_reason = "the weights were never loaded; commit a weight update"
        self._digest: Digest | None = None

    def tensor(self, name: str) -> Tensor:
        """View of a parameter, a tied name or a fused tensor."""
        name = self.manifest.aliases.get(name, name)
        where = self.manifest.modules.get(name) or self._slices[name]
        dtype: torch.dtype = getattr(torch, where.dtype)
        first = where.offset - self._base
        return self._arena[first : first + math.prod(where.shape) * dtype.itemsize].view(dtype).view(where.shape)

    def load(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        """Copy a whole checkpoint into the slices and define them as version 0.

        Raises ValueError naming missing, unexpected or wrongly shaped parameters; the weights are undefined then.
        """
        self.undefine(f"loading from {source} did not finish")
        loaded: set[str] = set()
        unexpected: list[str] = []
        for name, tensor in tensors:
            target = self.manifest.aliases.get(name, name)
            if target not in self._slices:
                if not name.endswith(_DERIVED_SUFFIXES):
                    unexpected.append(name)
                continue
            shape = self._slices[target].shape
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{source}: {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}")
            if target == name:  # a tied name's own copy is ignored, as transformers does
                self.tensor(name).copy_(tensor)
                loaded.add(name)
        missing = [name for name in self._slices if name not in loaded]
        if missing or unexpected:
            raise ValueError(
                f"{source} does not fit config.json: missing {_shorten(missing)}, unexpected {_shorten(unexpected)}"
            )
        self.define(0)

    def define(self, version: int) -> None:
        self.version = self.last_version = version
        self.undefined_reason = ""

    def undefine(self, reason: str) -> None:
        self.version = None
        self.undefined_reason = reason

    def digest(self) -> int:
        """Digest of every slice as it lies in memory, padding left out."""
        if self._digest is None:  # addresses are fixed: made once
            self._digest = Digest([(self.tensor(s.name), s.index_base) for s in self.manifest.slices])
        return self._digest.run()


def _shorten(names: list[str], limit: int = 5) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
