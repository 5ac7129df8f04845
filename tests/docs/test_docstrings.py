"""Public names say what they take, return and raise."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

PACKAGES = ["memsaver", "kvcache", "rollout", "trainer_bridge", "recipes"]


def undocumented(names: list[str], document: str) -> list[str]:
    """Return the names that no line ``name: meaning`` of an indented section explains."""
    return [
        name for name in names if not re.search(rf"^ +\*{{0,2}}{name}( \(.*\))?: ", document, re.M)
    ]


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def source(value: Any) -> Any:
    """Return the syntax tree of a function or class."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]


def raises(function: Callable[..., Any]) -> bool:
    return any(
        isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(source(function))
    )


def faults_of_function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    document = inspect.getdoc(function) or ""
    if missing := undocumented(parameters(function), document):
        yield f"{name}: Args: lacks {', '.join(missing)}"
    result = inspect.signature(function).return_annotation
    if result not in ("None", None, "NoReturn") and not re.search(
        "^(Returns|Yields):", document, re.M
    ):
        yield f"{name}: no Returns:"
    if raises(function) and "\nRaises:" not in document:
        yield f"{name}: no Raises:"


def faults_of_class(name: str, kind: type) -> Iterator[str]:
    document = ast.get_docstring(source(kind)) or ""  # a decorator may change __doc__
    own = vars(kind)
    if dataclasses.is_dataclass(kind):  # fields of a base class are documented there
        fields = [name for name in inspect.get_annotations(kind) if not name.startswith("_")]
    else:
        made = "__init__" in own and Protocol not in kind.__bases__
        fields = parameters(kind.__init__) if made else []
    if missing := undocumented(fields, document):
        yield f"{name}: Args: or Attributes: lacks {', '.join(missing)}"
    for member, value in list(own.items()):
        function = getattr(value, "__func__", value)  # of a class method
        if not member.startswith("_") and inspect.isfunction(function):
            yield from faults_of_function(f"{name}.{member}", function)
        elif isinstance(value, property) and not value.__doc__:
            yield f"{name}.{member}: no docstring"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_document_arguments_results_and_errors(package: str) -> None:
    module, faults = importlib.import_module(package), []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            faults += faults_of_class(name, value)
        elif inspect.isfunction(value):
            faults += faults_of_function(name, value)
    assert not faults, "\n".join(faults)
