"""What passes over a model need if it is exact: products and recomputation."""

import contextlib
from typing import Any

import torch

from trainer_bridge.config import TrainerConfig
from trainer_bridge.ops import exact


def forward_products(model: Any, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context for an exact model's forward passes, whose products are the engine's."""
    return exact.engine_products(device) if is_exact(model) else contextlib.nullcontext()


def backward_products(model: Any, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context for backward passes; products are the engine's if gradients have totals."""
    return exact.engine_products(device) if token_step(model) > 1 else contextlib.nullcontext()


def recomputation(config: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of torch's `checkpoint`: what it recomputes has forward's products."""
    how: dict[str, Any] = {"use_reentrant": False}
    if config.exact:
        device = torch.device(config.device)
        how["context_fn"] = lambda: (contextlib.nullcontext(), exact.engine_products(device))
    return how


def is_exact(model: Any) -> bool:
    """Return whether `make_exact` has exchanged the model's operations."""
    return getattr(model, "exact", False)


def token_step(model: Any) -> int:
    """Return the number of tokens, of which each sequence of a micro batch must have a multiple."""
    return getattr(model, "token_step", 1)
