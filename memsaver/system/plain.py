"""Encode plain values as text for process groups and sockets, so that no input is unpickled.

Values of JSON are encoded as such. Tuples, sets, bytes, mappings and records become objects with
one key, which names the type.
"""

import base64
import dataclasses
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions


class Plain:
    """Codec of JSON's values, tuples, sets, bytes, mappings, and the given record classes.

    Records are dataclasses or named tuples, and are encoded by the name of their class.
    """

    def __init__(self, *records: type) -> None:
        self._records = {record.__name__: record for record in records}

    def text(self, value: Any) -> str:
        """Encode a value; a ``TypeError`` names the type of an object that is not plain."""
        return json.dumps(self._plain(value), separators=(",", ":"))

    def value(self, text: str) -> Any:
        """Decode a text.

        Raises:
            ValueError: The text does not encode a plain value.
        """
        try:
            return json.loads(text, object_hook=self._made)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a plain value: {error}") from error

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self._plain(item) for item in value]
        if self._records.get(kind.__name__) is kind:
            return {kind.__name__: [self._plain(field) for field in _fields(value)]}
        if kind in _OPENED:
            name, opened = _OPENED[kind]
            return {name: [self._plain(item) for item in opened(value)]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        raise TypeError(f"{kind.__name__} is not among the plain values {', '.join(self._records)}")

    def _made(self, item: dict[str, Any]) -> Any:
        ((name, content),) = item.items()
        if name in _MADE:
            return _MADE[name](content)
        record: Any = self._records[name]
        if not hasattr(record, "__dataclass_fields__"):
            return record(*content)
        return record(**dict(zip(record.__dataclass_fields__, content, strict=True)))


def _fields(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value)


_OPENED: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("tuple", list),
    set: ("set", list),
    frozenset: ("frozenset", list),
    dict: ("dict", lambda value: [list(item) for item in value.items()]),
}
_MADE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": base64.b64decode,
}


_VALUES = Plain()


def all_gather_plain(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather all values in order of rank, like torch's all_gather_object but without pickle.

    Values consist of JSON's values, tuples, sets, bytes and mappings. Without a group, the default
    group is used.
    """
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    group = group or dist.group.WORLD
    assert group is not None
    return [_VALUES.value(text) for text in gather_texts(_VALUES.text(value), group, device)]


def gather_texts(
    text: str,
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
) -> list[str]:
    """Gather the texts of all ranks of a group, in order of rank.

    The group exchanges tensors on ``device``, by default the CPU. Each of the two collectives has
    ``timeout``, by default the group's.
    """
    mine = text_bytes(text).to(device)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    lengths[group.rank()] = len(mine)
    summing, gathering = AllreduceOptions(), AllgatherOptions()
    if timeout is not None:
        summing.timeout = gathering.timeout = timeout
    group.allreduce([lengths], summing).wait()
    sizes = lengths.tolist()
    padded = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
    parts = [torch.empty_like(padded) for _ in sizes]
    group.allgather([parts], [padded], gathering).wait()
    return [bytes_text(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def text_bytes(text: str) -> torch.Tensor:
    """Return a text that is not empty as bytes, uint8 on the CPU."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def bytes_text(content: torch.Tensor) -> str:
    """Return the text whose bytes, uint8, are given."""
    return content.cpu().numpy().tobytes().decode()
