"""Knows how checkpoint files hold parameters that the model names or cuts otherwise: a tensor for
each expert where the model stacks them, and Mixtral's own names.
"""

import math
import re
from typing import NamedTuple

Ints = tuple[int, ...]
_EXPERTS = ".mlp.experts."
# stacked: the parts of one expert, one below the other, as most families spell them, and Mixtral
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_MIXTRAL = ".block_sparse_moe."
# buffers of old checkpoints, and layers that predict further tokens (Qwen3-Next)
_UNUSED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(masked_)?bias$|^mtp\.")


class Stored(NamedTuple):
    """A tensor of a file: its shape, and where its first element is in the parameter, of which it
    may lack dimensions in front.
    """

    name: str
    start: Ints
    shape: Ints

    @property
    def box(self) -> Ints:
        """Its shape as a part of the parameter."""
        return (1,) * (len(self.start) - len(self.shape)) + self.shape

    @property
    def volume(self) -> int:
        return math.prod(self.shape)


def is_unused(name: str) -> bool:
    """Tells whether a tensor of a file is none that the model computes with."""
    return _UNUSED.search(name) is not None


def spellings(name: str, shape: Ints) -> list[list[Stored]]:
    """Every way in which files may hold a parameter of this name and shape, as it is first. Each
    is all of it.
    """
    ways = [[Stored(name, (0,) * len(shape), shape)]]
    layer, experts, stacked = name.partition(_EXPERTS)
    if experts and stacked in _PARTS:
        usual, mixtral = _PARTS[stacked]
        ways.append(_each(layer + _EXPERTS, usual, shape))
        ways.append(_each(f"{layer}{_MIXTRAL}experts.", mixtral, shape))
    elif name.endswith(".mlp.gate.weight"):
        ways.append([ways[0][0]._replace(name=name.replace(".mlp.", _MIXTRAL))])
    return ways


def _each(prefix: str, parts: tuple[str, ...], shape: Ints) -> list[Stored]:
    count, rows, columns = shape
    rows //= len(parts)
    found = []
    for expert in range(count):
        for number, part in enumerate(parts):
            name = f"{prefix}{expert}.{part}.weight"
            found.append(Stored(name, (expert, number * rows, 0), (rows, columns)))
    return found
