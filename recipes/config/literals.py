"""Choices of keys that modules without pydantic use, too."""

from typing import Literal

Checkpointing = Literal["layers", "mlp", "none"]
Extract = Literal["text", "number", "boxed", "tag"]
