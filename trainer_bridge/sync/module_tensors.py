"""Parameters and buffers of a module by checkpoint name."""

from __future__ import annotations

from torch import Tensor, nn

from rollout.model import stored_buffers

WRAPPED = "_checkpoint_wrapped_module."


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and stored buffers, without the names of checkpoint wrappers."""
    named = dict(module.named_parameters()) | stored_buffers(module)
    return {name.replace(WRAPPED, ""): tensor for name, tensor in named.items()}
