"""Decoder layers of transformers that compute what is around their products by `decoder_ops`.

What a module computes is asked of its class, on a few numbers: a family whose norm, gate or
rotation is another one keeps its own.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer_bridge.ops import decoder_ops

_ROTATION = "apply_rotary_pos_emb"  # by which an attention's forward calls its module's function


def fuse(model: nn.Module) -> None:
    """Exchange norms, gated activations and rotations of a model for `decoder_ops`."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm") and _normalizes(kind):
            module.forward = partial(_norm, module)
        elif hasattr(module, "gate_proj") and _gates(kind, _activation(module)):
            module.forward = partial(_mlp, module)
        elif _rotates(forward := unwrap(kind.forward)):  # a wrapper accepts names of before
            module.forward = MethodType(_with_rotation(forward), module)


def _activation(mlp: Any) -> Any:
    return type(getattr(mlp, "act_fn", None))


def _norm(norm: Any, x: Tensor) -> Tensor:
    return decoder_ops.rms_norm(x, norm.weight, norm.variance_epsilon)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(decoder_ops.silu_gate(mlp.gate_proj(x), mlp.up_proj(x)))


def _rotation(otherwise: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Compute `decoder_ops.rotate` of whole heads by tables of their dtype."""
    if named or len(given) > 4:
        return otherwise(*given, **named)
    q, k, cos, sin = given
    whole = {(len(cos), *q.shape[2:])} == {tuple(cos.shape), tuple(sin.shape)}
    alike = {q.dtype, k.dtype} == {cos.dtype, sin.dtype}
    return decoder_ops.rotate(*given) if whole and alike else otherwise(*given)


@cache
def _normalizes(kind: Any) -> bool:
    def compute(forward: Callable[..., Any]) -> Any:
        norm = SimpleNamespace(weight=_numbers(0.5, 2, 8), variance_epsilon=0.125)
        return forward(norm, _numbers(-2, 3, 2, 8))

    return _agree(compute, kind.forward, _norm)


@cache
def _gates(kind: Any, activation: Any) -> bool:
    def compute(forward: Callable[..., Any]) -> Any:
        x = _numbers(-2, 3, 2, 8)
        products = {"gate_proj": x.add, "up_proj": x.mul, "down_proj": x.sub}
        return forward(SimpleNamespace(**products, act_fn=activation()), x)

    return _agree(compute, kind.forward, _mlp)


@cache
def _rotates(forward: Any) -> bool:
    """Return whether a forward calls a function of its module that is `decoder_ops.rotate`."""
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if _ROTATION not in names or _ROTATION not in forward.__globals__:
        return False

    def compute(rotation: Callable[..., Any]) -> Any:
        q, k = _numbers(-2, 3, 1, 3, 4, 8), _numbers(2, 3, 1, 1, 4, 8)
        cos = _numbers(-1, 1, 1, 4, 8)
        return torch.cat(rotation(q, k, cos, cos.square()), 1)

    return _agree(compute, forward.__globals__[_ROTATION], decoder_ops.rotate)


def _with_rotation(forward: Any) -> FunctionType:
    """Return a forward that calls `decoder_ops.rotate` where it can."""
    names = {**forward.__globals__, _ROTATION: partial(_rotation, forward.__globals__[_ROTATION])}
    code, defaults = forward.__code__, forward.__defaults__
    copy = FunctionType(code, names, forward.__name__, defaults, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _agree(compute: Callable[[Any], Tensor], theirs: Any, ours: Any) -> bool:
    """Return whether two functions agree on numbers; theirs may need more than it gets.

    They are computed also where a plan or a meta device would let tensors have no content.
    """
    with torch.no_grad(), _disable_current_modes():
        try:
            return torch.allclose(compute(theirs), compute(ours), atol=1e-6)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False


def _numbers(first: float, last: float, *shape: int) -> Tensor:
    return torch.linspace(first, last, math.prod(shape), device="cpu").view(shape)
