"""Run calls with torch's own defaults, whatever state the caller has set."""

import contextlib
import inspect
from typing import TypeVar

import torch

_AUTOCAST = ("cpu", "cuda")
_Class = TypeVar("_Class", bound=type)


class torch_defaults(contextlib.ContextDecorator):
    """Context manager or decorator: no autocast, gradients recorded, tensors on the CPU in fp32.

    It enters only what differs from torch's defaults, so that it costs microseconds elsewhere.
    Operations inside may then choose gradients, devices and dtypes themselves.
    """

    def __enter__(self) -> None:
        self._entered = _entered()

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def _recreate_cm(self) -> "torch_defaults":
        return torch_defaults()


def _entered() -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if not torch.is_grad_enabled():  # also in inference mode, whose tensors nobody may update
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        return stack.pop_all()


def with_torch_defaults(cls: _Class) -> _Class:
    """Let the public methods that a class defines, and its constructor, run in `torch_defaults`."""
    for name, value in vars(cls).copy().items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, classmethod):
            setattr(cls, name, classmethod(torch_defaults()(value.__func__)))
        elif inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
            setattr(cls, name, torch_defaults()(value))
    return cls
