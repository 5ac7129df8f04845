"""Parameters and buffers of a module by checkpoint name."""

from torch import Tensor, nn

WRAPPED = "_checkpoint_wrapped_module."


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and stored buffers, without the names of checkpoint wrappers.

    Tied ones come once. Every sync calls this; torch's own walks would take three times as long.
    """
    names: dict[Tensor, str] = {}
    _collect(module, "", names)
    return {name: tensor for tensor, name in names.items()}


def _collect(module: nn.Module, prefix: str, names: dict[Tensor, str]) -> None:
    others = module._non_persistent_buffers_set
    for name, tensor in (module._parameters | module._buffers).items():
        if tensor is not None and name not in others:
            names.setdefault(tensor, prefix + name)
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.".removesuffix(WRAPPED), names)
