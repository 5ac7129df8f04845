"""The model of a plan without its memory, and which of its layers are alike."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from typing import Any

import torch

_AROUND = 1, 2  # neighbours before and behind a pattern: layers prefetch for each other


def meta_model(fields: dict[str, Any]) -> Any:
    """Transformers' model of a config with these fields."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = dict(fields)
    config = AutoConfig.for_model(rest.pop("model_type"), **rest)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def repeated_layers(fields: dict[str, Any]) -> tuple[int, int, int]:
    """Layers that stand for others: number of the first, how many, and how often they come again.

    They are a period of the model's layers. One more is traced before and one behind them, as the
    first and the last layer of each kind do more: they make and free what all of a kind share.
    """
    kinds = _kinds(meta_model(fields).get_decoder())
    count, (before, after) = len(kinds), _AROUND
    # At the least, a period of all that is left repeats; it comes once.
    spans = combinations(range(count + 1), 2)
    repeats = ((i, j) for i, j in spans if kinds[j:] == kinds[i : i + count - j])
    start, end = min(repeats, key=lambda span: span[1])
    first, period = end + before, end - start
    return first, period, max(0, (count - first - after) // period - 2)


def _kinds(decoder: Any) -> list[int]:
    """A number for each layer, the same where parameters are, and what the config's lists say."""
    count = len(decoder.layers)
    config = decoder.config.to_dict().values()
    lists = [value for value in config if isinstance(value, list) and len(value) == count]
    found: dict[Hashable, int] = {}
    kinds = []
    for index, layer in enumerate(decoder.layers):
        shapes = tuple((name, param.shape) for name, param in layer.named_parameters())
        said = tuple(str(each[index]) for each in lists)
        kinds.append(found.setdefault((shapes, said), len(found)))
    return kinds
