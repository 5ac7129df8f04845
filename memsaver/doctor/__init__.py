"""``memsaver doctor``: what this machine offers memsaver, what is in the way, and what to do about it.

>>> [check for check in examine() if check.status == "fail"]
"""

from __future__ import annotations

import torch

from memsaver.doctor import gpu, machine, software
from memsaver.doctor.check import Check, Probe, choose_target, run_probe

__all__ = ["Check", "examine"]

PROBES: list[Probe] = [*software.PROBES, *machine.PROBES, *gpu.PROBES]


def examine(device: str | torch.device | None = None) -> list[Check]:
    """Every check, in a fixed order. Never raises: a check that breaks is a failed check with the error's text.

    ``device``: the GPU to try (``None``: the current one, if there is any; ``"cpu"``: no GPU). Takes a few seconds,
    and on a GPU makes its CUDA context and up to 256 MiB of tensors, all given back but the context.
    """
    target = choose_target(device)
    return [run_probe(probe, target) for probe in PROBES]
