"""Functions of a module that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from memsaver.system.replaced import replaced


def test_usual_functions_are_back_after_nested_blocks_and_after_an_error() -> None:
    def double(value: int) -> int:
        return 2 * value

    def add_one(usual: Callable[[int], int], value: int) -> int:
        return usual(value) + 1

    module = SimpleNamespace(double=double)
    with replaced(module, double=add_one):
        assert module.double(3) == 7
        with pytest.raises(ValueError, match="inner"), replaced(module, double=add_one):
            assert module.double(3) == 8
            raise ValueError("inner")
        assert module.double(3) == 7
    assert module.double is double
