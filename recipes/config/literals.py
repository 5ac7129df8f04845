"""Choices of keys that modules without pydantic use, too."""

from typing import Literal

Extract = Literal["text", "number", "boxed", "tag"]
